/*!
 * \brief Runtime module of compiled PIM regions: programs and bank contents, called by symbol.
 *
 * A region's function takes the layer's input and its output tensor, both fp32 on the CPU, and has the
 * device execute the region's program. The device is whatever registered "pimflow.simulators.execute".
 */
#include <tvm/ffi/container/tensor.h>
#include <tvm/ffi/extra/module.h>
#include <tvm/ffi/reflection/registry.h>
#include <tvm/ffi/tvm_ffi.h>

#include <cstdlib>
#include <cstring>
#include <map>
#include <optional>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "serial.h"

namespace pimflow {
namespace {

namespace ffi = tvm::ffi;

constexpr uint64_t kMagic = 0x31304d4950ull;  // "PIM01"

struct Allocator {
  void AllocData(DLTensor* tensor) {
    size_t bytes = (tensor->dtype.bits + 7) / 8;
    for (int i = 0; i < tensor->ndim; ++i) bytes *= tensor->shape[i];
    tensor->data = std::aligned_alloc(64, (bytes + 127) / 64 * 64);
  }
  void FreeData(DLTensor* tensor) { std::free(tensor->data); }
};

template <typename T>
ffi::Tensor ToTensor(const std::vector<T>& values, ffi::Shape shape, DLDataType dtype) {
  ffi::Tensor tensor = ffi::Tensor::FromNDAlloc(Allocator(), shape, dtype, DLDevice{kDLCPU, 0});
  std::memcpy(tensor.data_ptr(), values.data(), values.size() * sizeof(T));
  return tensor;
}

ffi::Tensor CopyOf(const ffi::TensorView& view) {
  ffi::Tensor copy = ffi::Tensor::FromNDAlloc(Allocator(), view.shape(), view.dtype(), view.device());
  const char* data = static_cast<const char*>(view.data_ptr()) + view.byte_offset();
  std::memcpy(copy.data_ptr(), data, view.numel() * ((view.dtype().bits + 7) / 8));
  return copy;
}

constexpr DLDataType kInt64{kDLInt, 64, 1}, kInt32{kDLInt, 32, 1}, kFloat32{kDLFloat, 32, 1};

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

/*! \brief One region: its program, and what its banks hold. */
struct Region {
  std::vector<int64_t> header, words, offsets;
  std::vector<uint8_t> pages;  // [pages, banks, columns, elements] of the storage type
  std::vector<int64_t> pages_shape;
  std::vector<int32_t> table;
  int64_t half = 1;
  // What the device reads, made on the first call.
  std::optional<ffi::Tensor> header_tensor, words_tensor, offsets_tensor, lanes_tensor, table_tensor;

  void Prepare() {
    if (lanes_tensor) return;
    const int64_t count = pages_shape[0], banks = pages_shape[1];
    const int64_t columns = pages_shape[2], elements = pages_shape[3], row = columns * elements;
    std::vector<float> lanes(count * banks * row);
    for (int64_t p = 0; p < count; ++p) {
      for (int64_t b = 0; b < banks; ++b) {
        for (int64_t e = 0; e < row; ++e) {
          const int64_t from = (p * banks + b) * row + e;
          float value;
          if (half) {
            uint16_t bits;
            std::memcpy(&bits, &pages[from * 2], 2);
            value = FromHalf(bits);
          } else {
            std::memcpy(&value, &pages[from * 4], 4);
          }
          lanes[(p * row + e) * banks + b] = value;
        }
      }
    }
    auto flat = [](size_t n) { return ffi::Shape({static_cast<int64_t>(n)}); };
    header_tensor = ToTensor(header, flat(header.size()), kInt64);
    words_tensor = ToTensor(words, flat(words.size()), kInt64);
    offsets_tensor = ToTensor(offsets, flat(offsets.size()), kInt64);
    table_tensor = ToTensor(table, flat(table.size()), kInt32);
    lanes_tensor = ToTensor(lanes, flat(lanes.size()), kFloat32);
  }
};

/*! \brief Called after each region with (symbol, copies of input and output), if set. */
ffi::Optional<ffi::Function>& Observer() {
  static ffi::Optional<ffi::Function> observer;
  return observer;
}

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
      auto x = args[0].cast<ffi::TensorView>();
      auto y = args[args.size() - 1].cast<ffi::TensorView>();
      TVM_FFI_ICHECK(x.device().device_type == kDLCPU && y.device().device_type == kDLCPU)
          << "PIM region '" << name << "' needs tensors on the CPU; build for target 'llvm+pim'";
      region->Prepare();
      static ffi::Function execute = ffi::Function::GetGlobalRequired("pimflow.simulators.execute");
      const int64_t threads = std::max(1u, std::thread::hardware_concurrency());
      execute(*region->header_tensor, *region->words_tensor, *region->offsets_tensor, *region->lanes_tensor,
              *region->table_tensor, x, y, threads);
      if (Observer()) (*Observer())(name, CopyOf(x), CopyOf(y));
    });
  }

  ffi::Bytes SaveToBytes() const final {
    Writer w;
    w.Put(kMagic);
    w.Put<uint64_t>(regions.size());
    for (const auto& [name, region] : regions) {
      w.PutAll(name);
      w.Put(region.half);
      w.PutAll(region.header);
      w.PutAll(region.words);
      w.PutAll(region.offsets);
      w.PutAll(region.pages);
      w.PutAll(region.pages_shape);
      w.PutAll(region.table);
    }
    return ffi::Bytes(w.out);
  }

  static ffi::Module LoadFromBytes(const ffi::Bytes& bytes) {
    Reader r(bytes);
    TVM_FFI_ICHECK_EQ(r.Get<uint64_t>(), kMagic) << "not a PIM module";
    auto module = ffi::make_object<PimModuleObj>();
    for (uint64_t i = r.Get<uint64_t>(); i > 0; --i) {
      std::string name;
      r.GetAll(&name);
      Region region;
      region.half = r.Get<int64_t>();
      r.GetAll(&region.header);
      r.GetAll(&region.words);
      r.GetAll(&region.offsets);
      r.GetAll(&region.pages);
      r.GetAll(&region.pages_shape);
      r.GetAll(&region.table);
      module->regions.emplace(std::move(name), std::move(region));
    }
    return ffi::Module(module);
  }

  std::map<std::string, Region> regions;
};

template <typename T>
void Copy(const ffi::TensorView& from, std::vector<T>* to) {
  const auto* data = reinterpret_cast<const T*>(static_cast<const char*>(from.data_ptr()) + from.byte_offset());
  to->assign(data, data + from.numel());
}

ffi::Module CreateModule() { return ffi::Module(ffi::make_object<PimModuleObj>()); }

/*!
 * \brief Add a region to a module made by CreateModule.
 * \param pages [pages, banks, columns, elements], uint16 bits of fp16 or float32.
 */
void AddRegion(ffi::Module module, ffi::String symbol, ffi::TensorView header, ffi::TensorView words,
               ffi::TensorView offsets, ffi::TensorView pages, ffi::TensorView table) {
  auto* obj = static_cast<PimModuleObj*>(const_cast<ffi::ModuleObj*>(module.get()));
  Region region;
  Copy(header, &region.header);
  Copy(words, &region.words);
  Copy(offsets, &region.offsets);
  Copy(table, &region.table);
  region.half = pages.dtype().bits == 16;
  for (int i = 0; i < pages.ndim(); ++i) region.pages_shape.push_back(pages.size(i));
  const auto* data = static_cast<const uint8_t*>(pages.data_ptr()) + pages.byte_offset();
  region.pages.assign(data, data + pages.numel() * pages.dtype().bits / 8);
  obj->regions[std::string(symbol)] = std::move(region);
}

TVM_FFI_STATIC_INIT_BLOCK() {
  namespace refl = tvm::ffi::reflection;
  refl::GlobalDef()
      .def("pimflow.runtime.create_module", CreateModule)
      .def("pimflow.runtime.add_region", AddRegion)
      .def("pimflow.runtime.set_observer", [](ffi::Optional<ffi::Function> f) { Observer() = f; })
      .def("ffi.Module.load_from_bytes.pim", PimModuleObj::LoadFromBytes);
}

}  // namespace
}  // namespace pimflow
