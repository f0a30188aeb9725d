/*!
 * \brief Copies from page-locked host memory to a CUDA device, beside its kernels, by the runtime of TVM.
 *
 * Kernels run on the stream that is current for the device. A copy that is begun ahead has a stream of its own: it
 * waits for the kernels that were launched before it, which may still read its place, and the kernels behind its
 * awaiting wait for it, and for no copy that was begun later. The host waits for none of them.
 */
#ifndef PIMFLOW_DEVICE_COPIES_H_
#define PIMFLOW_DEVICE_COPIES_H_

#include <tvm/ffi/container/tensor.h>
#include <tvm/ffi/extra/c_env_api.h>
#include <tvm/ffi/function.h>
#include <tvm/ffi/optional.h>
#include <tvm/ffi/string.h>
#include <tvm/ffi/tvm_ffi.h>

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <list>
#include <mutex>
#include <vector>

#include "host_tensors.h"
#include "loaded_symbol.h"

namespace pimflow {

inline bool HasStreams(const ffi::Tensor& place) { return place.device().device_type == kDLCUDA; }

/*! \brief A copy of a tensor of the CPU in memory that the device reads by itself. */
inline ffi::Tensor PageLocked(const ffi::Tensor& weight) {
  static ffi::Function allocate = ffi::Function::GetGlobalRequired("runtime.TVMTensorAllocWithScope");
  const ffi::Shape shape(weight.shape().begin(), weight.shape().end());
  auto locked = allocate(shape, weight.dtype(), DLDevice{kDLCUDAHost, 0}, ffi::Optional<ffi::String>())
                    .cast<ffi::Tensor>();
  std::memcpy(locked.data_ptr(), DataBegin(weight), Bytes(weight));
  return locked;
}

/*! \brief Have a copy made by a stream; returns at once if `from` is page-locked. */
inline void CopyOnStream(const ffi::Tensor& from, const ffi::Tensor& to, void* stream) {
  using CopyFunction = void (*)(const DLTensor*, DLTensor*, void*);
  // tvm::runtime::Tensor::CopyFromTo: of the functions of TVM with names, none takes a stream.
  static const char* symbol = "_ZN3tvm7runtime6Tensor10CopyFromToEPK8DLTensorPS2_Pv";
  static const auto found = FindSymbol(symbol);
  TVM_FFI_ICHECK(found.second != nullptr) << "this TVM has no copies by streams; compile with --weights resident";
  const auto copy = reinterpret_cast<CopyFunction>(const_cast<char*>(found.second));
  copy(from.GetDLTensorPtr(), const_cast<DLTensor*>(to.GetDLTensorPtr()), stream);
}

inline void* KernelStream(DLDevice device) { return TVMFFIEnvGetStream(device.device_type, device.device_id); }

/*! \brief Copy in the order of the kernels. */
inline void CopyInOrder(const ffi::Tensor& weight, const ffi::Tensor& place) {
  CopyOnStream(weight, place, KernelStream(place.device()));
}

/*! \brief Copies that were begun and not awaited, each on a stream of its own. */
class CopyStreams {
 public:
  // Never destroyed: the driver may be gone before it.
  static CopyStreams& Instance() {
    static CopyStreams* streams = new CopyStreams();
    return *streams;
  }

  void Begin(const ffi::Tensor& weight, const ffi::Tensor& place) {
    const std::lock_guard<std::mutex> guard(mutex_);
    WaitFor(place);  // of an inference that ended in between
    const DLDevice device = place.device();
    const int64_t stream = TakeStream(device);
    Synchronise(device, AsNumber(KernelStream(device)), stream);
    CopyOnStream(weight, place, reinterpret_cast<void*>(stream));
    copies_.push_back({weight, place, stream});
  }

  /*! \brief Have the kernels that follow wait for the copy to `place`, if one was begun. */
  void Await(const ffi::Tensor& place) {
    const std::lock_guard<std::mutex> guard(mutex_);
    WaitFor(place);
  }

 private:
  struct DeviceCopy {
    ffi::Tensor weight, place;
    int64_t stream;
  };
  struct FreeStream {
    DLDevice device;
    int64_t stream;
  };

  static int64_t AsNumber(void* stream) { return reinterpret_cast<int64_t>(stream); }

  /*! \brief Have all that comes later on stream `to` wait for what is on stream `from` now. */
  static void Synchronise(DLDevice device, int64_t from, int64_t to) {
    static ffi::Function synchronise = ffi::Function::GetGlobalRequired("runtime.Device_StreamSyncFromTo");
    synchronise(device, from, to);
  }

  void WaitFor(const ffi::Tensor& place) {
    const auto copy = std::find_if(copies_.begin(), copies_.end(), [&](const DeviceCopy& candidate) {
      return DataBegin(candidate.place) == DataBegin(place);
    });
    if (copy == copies_.end()) return;
    const DLDevice device = place.device();
    Synchronise(device, copy->stream, AsNumber(KernelStream(device)));
    free_.push_back({device, copy->stream});
    copies_.erase(copy);
  }

  int64_t TakeStream(DLDevice device) {
    const auto free = std::find_if(free_.begin(), free_.end(), [&](const FreeStream& candidate) {
      return candidate.device.device_type == device.device_type && candidate.device.device_id == device.device_id;
    });
    if (free == free_.end()) {
      static ffi::Function create = ffi::Function::GetGlobalRequired("runtime.Device_StreamCreate");
      return create(device).cast<int64_t>();
    }
    const int64_t stream = free->stream;
    free_.erase(free);
    return stream;
  }

  std::mutex mutex_;
  std::list<DeviceCopy> copies_;
  std::vector<FreeStream> free_;
};

}  // namespace pimflow

#endif  // PIMFLOW_DEVICE_COPIES_H_
