// A CUDA device of TVM's runtime for tests, in the memory of the host, whose streams do nothing by themselves.
//
// What is issued to a stream waits there. `run` makes all of stream 0, on which kernels are: first whatever that waits
// for. So stream 0 is as early as can be; a device that is `eager` has all other streams as early as can be instead. A
// copy that nothing orders is too late in the one, or too soon in the other.
#include <tvm/ffi/extra/c_env_api.h>
#include <tvm/runtime/device_api.h>

#include <cstdlib>
#include <cstring>
#include <functional>
#include <map>
#include <vector>

namespace {

using tvm::Device;
using Stream = int64_t;

class RecordingDevice : public tvm::runtime::DeviceAPI {
 public:
  void SetDevice(Device) final {}
  void GetAttr(Device, tvm::runtime::DeviceAttrKind, tvm::ffi::Any* value) final { *value = 0; }  // does not exist
  void* AllocDataSpace(Device device, size_t bytes, size_t, DLDataType) final {
    char* data = static_cast<char*>(std::calloc(bytes + 1, 1));
    if (device.device_type == kDLCUDAHost) page_locked_[data] = bytes;
    return data;
  }
  void FreeDataSpace(Device, void*) final {}  // what is recorded may read it
  TVMStreamHandle CreateStream(Device) final { return reinterpret_cast<TVMStreamHandle>(++streams_); }
  void StreamSync(Device, TVMStreamHandle stream) final { RunAll(Number(stream)); }
  void SyncStreamFromTo(Device, TVMStreamHandle from, TVMStreamHandle to) final {
    const Stream source = Number(from);
    const size_t count = issued_[source].size();
    Issue(Number(to), [=] { RunFirst(source, count); });
  }

  void Issue(Stream stream, std::function<void()> operation) {
    issued_[stream].push_back(std::move(operation));
    if (eager && stream != 0) RunAll(stream);
  }
  void RunAll(Stream stream) { RunFirst(stream, issued_[stream].size()); }

  bool eager = false;
  int64_t streams_ = 0, copies_run = 0, pageable_copies = 0, copies_among_kernels = 0;

 protected:
  void CopyDataFromTo(const void* from, size_t from_offset, void* to, size_t to_offset, size_t bytes, Device, Device,
                      DLDataType, TVMStreamHandle stream) final {
    const char* source = static_cast<const char*>(from) + from_offset;
    auto block = page_locked_.upper_bound(source);
    const bool locked = block != page_locked_.begin() && (--block, source + bytes <= block->first + block->second);
    pageable_copies += !locked;
    copies_among_kernels += Number(stream) == 0;
    Issue(Number(stream), [=] {
      std::memcpy(static_cast<char*>(to) + to_offset, source, bytes);
      ++copies_run;
    });
  }

 private:
  static Stream Number(TVMStreamHandle stream) { return reinterpret_cast<Stream>(stream); }
  void RunFirst(Stream stream, size_t count) {
    while (run_[stream] < count) {
      const std::function<void()> operation = issued_[stream][run_[stream]++];
      operation();
    }
  }

  std::map<Stream, std::vector<std::function<void()>>> issued_;
  std::map<Stream, size_t> run_;
  std::map<const char*, size_t> page_locked_;
};

RecordingDevice device;

}  // namespace

extern "C" {
void* device_api() { return static_cast<tvm::runtime::DeviceAPI*>(&device); }
void set_eager(bool eager) { device.eager = eager; }
void run() { device.RunAll(0); }
// A kernel that reads a tensor, and one that writes a byte all over it.
void read(const void* from, int64_t bytes, void* to) {
  device.Issue(0, [=] { std::memcpy(to, from, bytes); });
}
void fill(void* to, int64_t bytes, int value) {
  device.Issue(0, [=] { std::memset(to, value, bytes); });
}
int64_t count(int what) {
  const int64_t counts[] = {device.streams_, device.copies_run, device.pageable_copies, device.copies_among_kernels};
  return counts[what];
}
}
