/*!
 * \brief Weights in host memory, and copies of them to their places in the pool during an inference.
 *
 * On the CPU a second thread makes the copies that are begun ahead, in order, as a queue of a device would. Copies to
 * CUDA begin in page-locked memory and have streams of their own (`device_copies.h`). Copies to any other device are
 * made by TVM in the order of its kernels, when they are begun.
 *
 * A module holds the weights of a network. A library that `network_module.store` writes has their values apart from
 * the module, under a symbol of their own: they are read where the library is mapped, and take no memory of the heap.
 */
#include <tvm/ffi/container/array.h>
#include <tvm/ffi/container/tensor.h>
#include <tvm/ffi/extra/module.h>
#include <tvm/ffi/function.h>
#include <tvm/ffi/reflection/registry.h>
#include <tvm/ffi/tvm_ffi.h>

#include <algorithm>
#include <condition_variable>
#include <cstdint>
#include <cstring>
#include <fstream>
#include <list>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "device_copies.h"
#include "host_tensors.h"
#include "loaded_symbol.h"
#include "serial.h"
#include "tensor_serial.h"

namespace pimflow {
namespace {

namespace ffi = tvm::ffi;

bool IsOnCpu(const ffi::Tensor& tensor) { return tensor.device().device_type == kDLCPU; }

void CopyWeight(const ffi::Tensor& weight, const ffi::Tensor& place) {
  if (IsOnCpu(place)) {
    std::memcpy(const_cast<char*>(DataBegin(place)), DataBegin(weight), Bytes(weight));
  } else if (HasStreams(place)) {
    CopyInOrder(weight, place);
  } else {
    CopyBetweenDevices(weight, place);
  }
}

/*! \brief Copies that were begun, by a thread that makes them in order. */
class CopyQueue {
 public:
  // Never destroyed: its thread may outlast all statics.
  static CopyQueue& Instance() {
    static CopyQueue* queue = new CopyQueue();
    return *queue;
  }

  void Begin(const ffi::Tensor& weight, const ffi::Tensor& place) {
    const std::lock_guard<std::mutex> guard(mutex_);
    if (!has_thread_) std::thread([this] { MakeCopies(); }).detach();
    has_thread_ = true;
    copies_.push_back({weight, place, false});
    begun_.notify_one();
  }

  /*!
   * \brief Return once nothing is left to copy to `place`.
   *
   * A copy that the thread has not begun is made here: it need not wait for those before it, and a process that was
   * forked has no thread.
   */
  void Await(const ffi::Tensor& place) {
    std::unique_lock<std::mutex> lock(mutex_);
    for (;;) {
      const auto copy = std::find_if(copies_.begin(), copies_.end(), [&](const WeightCopy& candidate) {
        return DataBegin(candidate.place) == DataBegin(place);
      });
      if (copy == copies_.end()) return;
      if (!copy->is_running) {
        const WeightCopy taken = *copy;
        copies_.erase(copy);
        lock.unlock();
        CopyWeight(taken.weight, taken.place);
        return;
      }
      done_.wait(lock);
    }
  }

 private:
  struct WeightCopy {
    ffi::Tensor weight, place;
    bool is_running;
  };

  void MakeCopies() {
    std::unique_lock<std::mutex> lock(mutex_);
    for (;;) {
      const auto copy = std::find_if(copies_.begin(), copies_.end(),
                                     [](const WeightCopy& candidate) { return !candidate.is_running; });
      if (copy == copies_.end()) {
        begun_.wait(lock);
        continue;
      }
      copy->is_running = true;
      lock.unlock();
      CopyWeight(copy->weight, copy->place);  // only this thread removes a copy that is running
      lock.lock();
      copies_.erase(copy);
      done_.notify_all();
    }
  }

  std::mutex mutex_;
  std::condition_variable begun_, done_;
  std::list<WeightCopy> copies_;
  bool has_thread_ = false;
};

/*! \brief Begin a copy that `AwaitWeightCopy` waits for. */
void BeginWeightCopy(const ffi::Tensor& weight, const ffi::Tensor& place) {
  if (IsOnCpu(place)) {
    CopyQueue::Instance().Begin(weight, place);
  } else if (HasStreams(place)) {
    CopyStreams::Instance().Begin(weight, place);
  } else {
    CopyBetweenDevices(weight, place);
  }
}

void AwaitWeightCopy(ffi::Tensor place) {
  if (IsOnCpu(place)) {
    CopyQueue::Instance().Await(place);
  } else if (HasStreams(place)) {
    CopyStreams::Instance().Await(place);
  }
}

constexpr uint64_t kWeightsMagic = 0x3130545745494d50ull;  // "PMIEWT01"
constexpr int64_t kAlignment = 64;                // of the values of each weight, from the symbol on

/*! \brief Memory of a loaded library, which stays loaded as long as a tensor lies there. */
struct LibraryMemory {
  void AllocData(DLTensor* tensor) { tensor->data = const_cast<char*>(data); }
  void FreeData(DLTensor*) {}

  std::shared_ptr<void> library;
  const char* data;
};

class WeightsModuleObj : public ffi::ModuleObj {
 public:
  explicit WeightsModuleObj(std::vector<ffi::Tensor> weights)
      : weights_(std::move(weights)), locked_(weights_.size()) {}

  const char* kind() const final { return "pimflow_weights"; }
  int GetPropertyMask() const final { return ffi::Module::kBinarySerializable | ffi::Module::kRunnable; }

  ffi::Optional<ffi::Function> GetFunction(const ffi::String& name) final {
    if (name == "pimflow.await_weight_copy") return ffi::Function::FromTyped(AwaitWeightCopy);
    const bool begins = name == "pimflow.begin_weight_copy";
    if (!begins && name != "pimflow.copy_weight") return std::nullopt;
    auto self = ffi::GetObjectPtr<WeightsModuleObj>(this);
    return ffi::Function::FromTyped([self, begins](int64_t index, ffi::Tensor place) {
      TVM_FFI_ICHECK_EQ(Bytes(self->weights_.at(index)), Bytes(place)) << "a weight does not fit its place";
      (begins ? BeginWeightCopy : CopyWeight)(self->Source(index, place), place);
    });
  }

  ffi::Bytes SaveToBytes() const final {
    Writer w;
    w.Put(kWeightsMagic);
    w.PutAll(symbol_);
    w.Put<uint64_t>(weights_.size());
    for (const ffi::Tensor& weight : weights_) {
      if (symbol_.empty()) {
        PutTensor(weight, &w);
      } else {
        PutTensorForm(weight, &w);
      }
    }
    return ffi::Bytes(w.out);
  }

  static ffi::Module LoadFromBytes(const ffi::Bytes& bytes) {
    Reader r(bytes);
    if (r.Get<uint64_t>() != kWeightsMagic) {
      TVM_FFI_THROW(ArtifactError) << "weights of another version of pimflow: compile the network again";
    }
    std::string symbol;
    r.GetAll(&symbol);
    std::vector<ffi::Tensor> weights;
    auto [library, data] = symbol.empty() ? std::pair<std::shared_ptr<void>, const char*>() : FindSymbol(symbol);
    TVM_FFI_ICHECK(symbol.empty() || data != nullptr) << "no loaded library has the weights " << symbol;
    for (uint64_t i = r.Get<uint64_t>(); i > 0; --i) {
      if (symbol.empty()) {
        weights.push_back(GetTensor(&r));
        continue;
      }
      const TensorForm form = GetTensorForm(&r);
      const LibraryMemory memory{library, data};
      weights.push_back(ffi::Tensor::FromNDAlloc(memory, ffi::Shape(form.shape), form.dtype, DLDevice{kDLCPU, 0}));
      data += AlignUp(form.bytes);
    }
    return ffi::Module(ffi::make_object<WeightsModuleObj>(std::move(weights)));
  }

  /*!
   * \brief Write the values of all weights to a file, and store the module without them from now on.
   * \return The symbol that a library has to give the contents of the file; with symbol empty, undo that.
   */
  ffi::String StoreApart(const ffi::String& path) {
    symbol_.clear();
    if (path.empty()) return symbol_;
    std::ofstream file(std::string(path), std::ios::binary);
    uint64_t digest = 0xcbf29ce484222325ull;  // FNV-1a over words, so that equal names have equal contents
    for (const ffi::Tensor& weight : weights_) {
      std::string padded(DataBegin(weight), Bytes(weight));
      padded.resize(AlignUp(padded.size()));
      file.write(padded.data(), padded.size());
      for (size_t i = 0; i < padded.size(); i += 8) {
        uint64_t word;
        std::memcpy(&word, padded.data() + i, 8);
        digest = (digest ^ word) * 0x100000001b3ull;
        digest ^= digest >> 29;
      }
    }
    if (!file.flush()) return ffi::String();
    symbol_ = "pimflow_weights_" + std::to_string(digest) + "_" + std::to_string(weights_.size());
    return symbol_;
  }

 private:
  /*! \brief The weight, for a device with streams in page-locked memory, where it stays from its first copy on. */
  ffi::Tensor Source(int64_t index, const ffi::Tensor& place) {
    if (!HasStreams(place)) return weights_.at(index);
    const std::lock_guard<std::mutex> guard(locking_);
    std::optional<ffi::Tensor>& locked = locked_.at(index);
    if (!locked) locked = PageLocked(weights_.at(index));
    return *locked;
  }

  static uint64_t AlignUp(uint64_t bytes) { return (bytes + kAlignment - 1) / kAlignment * kAlignment; }

  std::vector<ffi::Tensor> weights_;
  std::mutex locking_;
  std::vector<std::optional<ffi::Tensor>> locked_;  // by weight, its page-locked copy
  std::string symbol_;  // of the values, if they are stored apart
};

TVM_FFI_STATIC_INIT_BLOCK() {
  namespace refl = tvm::ffi::reflection;
  refl::GlobalDef()
      .def("pimflow.runtime.create_weights",
           [](ffi::Array<ffi::Tensor> weights) {
             return ffi::Module(
                 ffi::make_object<WeightsModuleObj>(std::vector<ffi::Tensor>(weights.begin(), weights.end())));
           })
      .def("pimflow.runtime.store_weights_apart",
           [](ffi::Module module, ffi::String path) {
             return static_cast<WeightsModuleObj*>(const_cast<ffi::ModuleObj*>(module.get()))->StoreApart(path);
           })
      .def("ffi.Module.load_from_bytes.pimflow_weights", WeightsModuleObj::LoadFromBytes);
}

}  // namespace
}  // namespace pimflow
