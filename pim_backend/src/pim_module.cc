/*!
 * \brief Runtime module of compiled PIM regions: programs and bank contents, called by symbol.
 *
 * A region's function takes the layer's input, what its latches start from unless the region has that, and
 * its output tensor, fp32 or fp16, on the CPU or on another device of TVM's, and has the PIM device execute the region's program. That device is whatever
 * registered "pimflow.simulators.execute"; it works on fp32 in host memory, so other tensors are copied, and
 * an input that the output would overwrite.
 */
#include <tvm/ffi/container/tensor.h>
#include <tvm/ffi/extra/c_env_api.h>
#include <tvm/ffi/extra/module.h>
#include <tvm/ffi/reflection/registry.h>
#include <tvm/ffi/tvm_ffi.h>

#include <array>
#include <cstdlib>
#include <cstring>
#include <map>
#include <mutex>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "serial.h"

namespace pimflow {
namespace {

namespace ffi = tvm::ffi;

constexpr uint64_t kMagic = 0x35304d4950ull;  // "PIM05"

struct Allocator {
  void AllocData(DLTensor* tensor) {
    size_t bytes = (tensor->dtype.bits + 7) / 8;
    for (int i = 0; i < tensor->ndim; ++i) bytes *= tensor->shape[i];
    tensor->data = std::aligned_alloc(64, (bytes + 127) / 64 * 64);
  }
  void FreeData(DLTensor* tensor) { std::free(tensor->data); }
};

constexpr DLDataType kFloat32{kDLFloat, 32, 1};

ffi::Tensor HostTensor(ffi::ShapeView shape, DLDataType dtype) {
  return ffi::Tensor::FromNDAlloc(Allocator(), shape, dtype, DLDevice{kDLCPU, 0});
}

/*! \brief Copy between any two devices; waits until it is done. */
void CopyBetweenDevices(const ffi::Tensor& from, const ffi::Tensor& to) {
  static ffi::Function copy = ffi::Function::GetGlobalRequired("runtime.TVMTensorCopyFromTo");
  copy(from, to);
}

inline float FromHalf(uint16_t half) {
  const uint32_t sign = static_cast<uint32_t>(half & 0x8000u) << 16;
  const uint32_t exponent = (half >> 10) & 31u, fraction = half & 0x3ffu;
  uint32_t bits;
  if (exponent == 0) {
    const float value = static_cast<float>(fraction) * 0x1p-24f;
    std::memcpy(&bits, &value, 4);
  } else {
    bits = (exponent == 31 ? 0x7f800000u : (exponent + 112) << 23) | fraction << 13;
  }
  bits |= sign;
  float result;
  std::memcpy(&result, &bits, 4);
  return result;
}

/*! \brief To the nearest fp16 value, ties to even. */
inline uint16_t ToHalf(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, 4);
  const uint16_t sign = (bits >> 16) & 0x8000u;
  bits &= 0x7fffffffu;
  if (bits >= 0x47800000u) return sign | (bits > 0x7f800000u ? 0x7e00u : 0x7c00u);  // NaN, or too large
  if (bits < 0x38800000u) {  // subnormal: the sum aligns its last bit with fp16's
    float magnitude;
    std::memcpy(&magnitude, &bits, 4);
    magnitude += 0.5f;
    std::memcpy(&bits, &magnitude, 4);
    return sign | static_cast<uint16_t>(bits - 0x3f000000u);
  }
  bits += 0xc8000fffu + ((bits >> 13) & 1u);
  return sign | static_cast<uint16_t>(bits >> 13);
}

int64_t Bytes(const ffi::Tensor& tensor) { return tensor.numel() * tensor.dtype().bits / 8; }

const char* Begin(const ffi::Tensor& tensor) {
  return static_cast<const char*>(tensor.data_ptr()) + tensor.byte_offset();
}

/*! \brief Whether the device can work on a tensor where it lies. */
bool IsHostFloat32(const ffi::Tensor& tensor) {
  return tensor.device().device_type == kDLCPU && tensor.dtype().bits == 32;
}

bool Overlap(const ffi::Tensor& a, const ffi::Tensor& b) {
  return Begin(a) < Begin(b) + Bytes(b) && Begin(b) < Begin(a) + Bytes(a);
}

/*! \brief A copy of `x` in fp32 on the CPU. */
ffi::Tensor ToHost(const ffi::Tensor& x) {
  ffi::Tensor host = x;
  if (x.device().device_type != kDLCPU) {
    host = HostTensor(x.shape(), x.dtype());
    CopyBetweenDevices(x, host);
  }
  ffi::Tensor full = HostTensor(x.shape(), kFloat32);
  const char* data = Begin(host);
  auto* to = static_cast<float*>(full.data_ptr());
  if (x.dtype().bits == 16) {
    const auto* from = reinterpret_cast<const uint16_t*>(data);
    for (int64_t i = 0; i < x.numel(); ++i) to[i] = FromHalf(from[i]);
  } else {
    std::memcpy(to, data, x.numel() * sizeof(float));
  }
  return full;
}

/*! \brief Store `full`, fp32 on the CPU, in `y`. */
void FromHost(const ffi::Tensor& full, const ffi::Tensor& y) {
  const bool on_host = y.device().device_type == kDLCPU;
  ffi::Tensor host = on_host ? y : HostTensor(y.shape(), y.dtype());
  char* data = static_cast<char*>(host.data_ptr()) + host.byte_offset();
  const auto* from = static_cast<const float*>(full.data_ptr());
  if (y.dtype().bits == 16) {
    auto* to = reinterpret_cast<uint16_t*>(data);
    for (int64_t i = 0; i < y.numel(); ++i) to[i] = ToHalf(from[i]);
  } else {
    std::memcpy(data, from, y.numel() * sizeof(float));
  }
  if (!on_host) CopyBetweenDevices(host, y);
}

/*! \brief What a region's function hands to the device: its program, and what its banks hold. */
struct Region {
  ffi::Tensor header, words, offsets;
  ffi::Tensor pages;  // bits [pages, elements per row, banks] of the storage type
  ffi::Tensor table;
  ffi::Tensor initial;  // what latches start from, fp32 [oc]; empty if they do from zero, or from a tensor

  std::array<ffi::Tensor*, 6> All() { return {&header, &words, &offsets, &pages, &table, &initial}; }
};

void PutTensor(const ffi::Tensor& tensor, Writer* w) {
  w->Put(tensor.dtype());
  w->PutAll(tensor.shape());
  w->out.append(static_cast<const char*>(tensor.data_ptr()), Bytes(tensor));
}

ffi::Tensor GetTensor(Reader* r) {
  const auto dtype = r->Get<DLDataType>();
  std::vector<int64_t> shape;
  r->GetAll(&shape);
  uint64_t bytes = dtype.bits / 8;
  for (int64_t extent : shape) {
    TVM_FFI_ICHECK(extent >= 0 && extent < int64_t{1} << 31 && bytes < uint64_t{1} << 31)
        << "not a tensor of a PIM module";
    bytes *= extent;
  }
  const char* data = r->Take(bytes);
  ffi::Tensor tensor = HostTensor(ffi::Shape(shape), dtype);
  std::memcpy(tensor.data_ptr(), data, bytes);
  return tensor;
}

/*! \brief Called after each region with (symbol, input, initial, output), all fp32 on the CPU, if set. */
class Observer {
 public:
  void Set(ffi::Optional<ffi::Function> observer) {
    const std::lock_guard<std::mutex> guard(mutex_);
    std::swap(observer_, observer);
  }
  /*! \brief A reference of one's own: another thread may set the next while this one is called. */
  ffi::Optional<ffi::Function> Get() {
    const std::lock_guard<std::mutex> guard(mutex_);
    return observer_;
  }

  static Observer& OfThisProcess() {
    static Observer* observer = new Observer();  // Python may be gone when statics are destroyed
    return *observer;
  }

 private:
  std::mutex mutex_;
  ffi::Optional<ffi::Function> observer_;
};

class PimModuleObj : public ffi::ModuleObj {
 public:
  const char* kind() const final { return "pim"; }
  int GetPropertyMask() const final {
    return ffi::Module::kBinarySerializable | ffi::Module::kRunnable;
  }

  ffi::Optional<ffi::Function> GetFunction(const ffi::String& name) final {
    auto found = regions.find(std::string(name));
    if (found == regions.end()) return std::nullopt;
    Region* region = &found->second;
    auto self = ffi::GetObjectPtr<ffi::Object>(static_cast<ffi::Object*>(this));
    return ffi::Function::FromPacked([self, region, name](ffi::PackedArgs args, ffi::Any*) {
      if (args.size() < 2) {
        TVM_FFI_THROW(TypeError) << "PIM region '" << name << "' takes an input and an output tensor";
      }
      auto x = args[0].cast<ffi::Tensor>(), y = args[args.size() - 1].cast<ffi::Tensor>();
      const bool takes_initial = args.size() > 2;
      auto initial = takes_initial ? args[1].cast<ffi::Tensor>() : region->initial;
      for (const ffi::Tensor& each : {x, initial, y}) {
        TVM_FFI_ICHECK(each.dtype().code == kDLFloat && (each.dtype().bits == 32 || each.dtype().bits == 16))
            << "PIM region '" << name << "' takes tensors of fp32 or fp16";
      }
      if (TVMFFIEnvCheckSignals() != 0) throw ffi::EnvErrorAlreadySet();  // else Ctrl-C waits for the last region
      static ffi::Function execute = ffi::Function::GetGlobalRequired("pimflow.simulators.execute");
      const int64_t threads = std::max(1u, std::thread::hardware_concurrency());
      const bool in_place = IsHostFloat32(y);
      ffi::Tensor result = in_place ? y : HostTensor(y.shape(), kFloat32);
      const auto ready = [&](const ffi::Tensor& read) {
        return IsHostFloat32(read) && !Overlap(read, result) ? read : ToHost(read);
      };
      ffi::Tensor operand = ready(x), start = takes_initial ? ready(initial) : initial;
      execute(region->header, region->words, region->offsets, region->pages, region->table, operand, start,
              result, threads, ffi::String());
      if (!in_place) FromHost(result, y);
      if (auto observer = Observer::OfThisProcess().Get()) (*observer)(name, operand, start, result);
    });
  }

  ffi::Bytes SaveToBytes() const final {
    Writer w;
    w.Put(kMagic);
    w.Put<uint64_t>(regions.size());
    for (const auto& [name, region] : regions) {
      w.PutAll(name);
      for (const ffi::Tensor* tensor : Region(region).All()) PutTensor(*tensor, &w);
    }
    return ffi::Bytes(w.out);
  }

  static ffi::Module LoadFromBytes(const ffi::Bytes& bytes) {
    Reader r(bytes);
    if (r.Get<uint64_t>() != kMagic) {
      TVM_FFI_THROW(ArtifactError) << "PIM regions of another version of pimflow: compile the network again";
    }
    auto module = ffi::make_object<PimModuleObj>();
    for (uint64_t i = r.Get<uint64_t>(); i > 0; --i) {
      std::string name;
      r.GetAll(&name);
      Region region;
      for (ffi::Tensor* tensor : region.All()) *tensor = GetTensor(&r);
      module->regions.emplace(std::move(name), std::move(region));
    }
    return ffi::Module(module);
  }

  std::map<std::string, Region> regions;
};

ffi::Tensor Copy(const ffi::TensorView& from) {
  ffi::Tensor to = HostTensor(from.shape(), from.dtype());
  std::memcpy(to.data_ptr(), static_cast<const char*>(from.data_ptr()) + from.byte_offset(), Bytes(to));
  return to;
}

ffi::Module CreateModule() { return ffi::Module(ffi::make_object<PimModuleObj>()); }

/*!
 * \brief Add a region to a module made by CreateModule.
 * \param pages [pages, elements per row, banks], bits of the storage type.
 * \param initial fp32 [oc] that latches start from; empty for none, or for the region's second argument.
 */
void AddRegion(ffi::Module module, ffi::String symbol, ffi::TensorView header, ffi::TensorView words,
               ffi::TensorView offsets, ffi::TensorView pages, ffi::TensorView table, ffi::TensorView initial) {
  auto* obj = static_cast<PimModuleObj*>(const_cast<ffi::ModuleObj*>(module.get()));
  Region region{Copy(header), Copy(words), Copy(offsets), Copy(pages), Copy(table), Copy(initial)};
  obj->regions[std::string(symbol)] = std::move(region);
}

TVM_FFI_STATIC_INIT_BLOCK() {
  namespace refl = tvm::ffi::reflection;
  refl::GlobalDef()
      .def("pimflow.runtime.create_module", CreateModule)
      .def("pimflow.runtime.add_region", AddRegion)
      .def("pimflow.runtime.set_observer",
           [](ffi::Optional<ffi::Function> observer) { Observer::OfThisProcess().Set(std::move(observer)); })
      .def("ffi.Module.load_from_bytes.pim", PimModuleObj::LoadFromBytes);
}

}  // namespace
}  // namespace pimflow
