/*!
 * \brief Runtime module of compiled PIM regions: programs and bank contents, called by symbol.
 *
 * A region's function takes the layer's input, the initial values of its latches (unless the region has them), and
 * its output tensor, in fp32 or fp16, on the CPU or another device of TVM. It has the PIM device execute the
 * region's program. This device is the function "pimflow.simulators.execute". It works on fp32 in host memory, so
 * other tensors are copied, and so is an input that the output would overwrite.
 *
 * The function of a product with a cache takes vectors, positions, caches in the layout of the banks, for each cache
 * that it writes the new tokens, and its output. It writes the tokens at the positions, and then multiplies with the
 * first cache, over the places up to the largest position.
 */
#include <tvm/ffi/container/array.h>
#include <tvm/ffi/container/tensor.h>
#include <tvm/ffi/extra/c_env_api.h>
#include <tvm/ffi/extra/module.h>
#include <tvm/ffi/reflection/registry.h>
#include <tvm/ffi/tvm_ffi.h>

#include <algorithm>
#include <array>
#include <cstdlib>
#include <cstring>
#include <map>
#include <mutex>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "host_tensors.h"
#include "serial.h"

namespace pimflow {
namespace {

namespace ffi = tvm::ffi;

constexpr uint64_t kMagic = 0x39304d4950ull;  // "PIM09"

/*! \brief What a region's function passes to the device: its program and the contents of the banks. */
struct Region {
  ffi::Tensor header, words, offsets;
  ffi::Tensor pages;  // bits [pages, elements per row, banks] of the storage type
  ffi::Tensor table;
  ffi::Tensor initial;  // initial values of latches, fp32 [oc]; empty if they start from zero or from a tensor
  int64_t own_channels = 0;    // channels of its vectors that come from its input, whose last they are
  int64_t input_channels = 0;
  int64_t added_channels = 0;  // channels of its vectors that come from a tensor that the product adds

  std::array<ffi::Tensor*, 6> All() { return {&header, &words, &offsets, &pages, &table, &initial}; }
};

/*! \brief What the function of a product with a cache passes to the device; see AddCacheProduct. */
struct CacheProduct {
  std::vector<ffi::Tensor> appends, product;
};

constexpr size_t kOfAppend = 5;  // tensors of an append
/*! \brief Indices of the tensors of a product; kProducts to kLimits are arguments of `products_of_tokens`. */
enum OfProduct { kHeader, kProducts, kKinds, kChannels, kSizes, kLimits, kTaken, kFound, kBegins, kTable, kOfProduct };

void PutTensor(const ffi::Tensor& tensor, Writer* w) {
  w->Put(tensor.dtype());
  w->PutAll(tensor.shape());
  w->out.append(static_cast<const char*>(tensor.data_ptr()), Bytes(tensor));
}

void PutTensors(const std::vector<ffi::Tensor>& tensors, Writer* w) {
  w->Put<uint64_t>(tensors.size());
  for (const ffi::Tensor& tensor : tensors) PutTensor(tensor, w);
}

ffi::Tensor GetTensor(Reader* r) {
  const auto dtype = r->Get<DLDataType>();
  std::vector<int64_t> shape;
  r->GetAll(&shape);
  TVM_FFI_ICHECK(dtype.bits >= 8 && dtype.bits % 8 == 0 && dtype.lanes == 1) << "not a tensor of a PIM module";
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

std::vector<ffi::Tensor> GetTensors(Reader* r) {
  std::vector<ffi::Tensor> tensors;
  for (uint64_t left = r->Get<uint64_t>(); left > 0; --left) tensors.push_back(GetTensor(r));
  return tensors;
}

/*!
 * \brief Holds the function, if set, that is called after each region with (symbol, operands, output).
 *
 * Tensors are on the CPU, floats in fp32. Operands are the input, the initial values of latches and, if there is one,
 * the tensor that the product adds; or vectors, positions, caches after the region (in their own type), and tokens.
 */
class Observer {
 public:
  void Set(ffi::Optional<ffi::Function> observer) {
    const std::lock_guard<std::mutex> guard(mutex_);
    std::swap(observer_, observer);
  }
  /*! \brief The function, as a reference that stays valid if another thread sets a new one during the call. */
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

void RequirePlaces(const ffi::String& name, const ffi::Tensor& position, int64_t places) {
  TVM_FFI_ICHECK(position.dtype().code == kDLInt && position.dtype().bits == 64) << "positions are of int64";
  const auto* each = reinterpret_cast<const int64_t*>(Begin(position));
  for (int64_t i = 0; i < position.numel(); ++i) {
    if (each[i] < 0 || each[i] >= places) {
      TVM_FFI_THROW(ArtifactError) << "'" << name << "': there is no place " << each[i] << " in a cache of "
                                   << places << "; compile with a longer context";
    }
  }
}

/*! \brief Number of places of a cache that are read: up to the largest position. */
int64_t Tokens(const ffi::Tensor& position) {
  const auto* each = reinterpret_cast<const int64_t*>(Begin(position));
  return *std::max_element(each, each + position.numel()) + 1;
}

/*! \brief Run a program on the device, with the rows in `pages`. */
void Execute(const ffi::Tensor& header, const ffi::Tensor& words, const ffi::Tensor& offsets,
             const ffi::Tensor& pages, const ffi::Tensor& table, const ffi::Tensor& input,
             const ffi::Tensor& initial, const ffi::Tensor& output) {
  static ffi::Function execute = ffi::Function::GetGlobalRequired("pimflow.simulators.execute");
  const int64_t threads = std::max(1u, std::thread::hardware_concurrency());
  execute(header, words, offsets, pages, table, input, initial, output, threads, ffi::String());
}

/*! \brief Write tokens at their positions; `of` points to the kOfAppend tensors of the append. */
void Append(const ffi::String& name, const ffi::Tensor* of, const ffi::Tensor& tokens,
            const ffi::Tensor& position, const ffi::Tensor& cache) {
  static ffi::Function choose = ffi::Function::GetGlobalRequired("pimflow.simulators.chosen");
  const auto* sizes = static_cast<const int64_t*>(of[4].data_ptr());
  const int64_t matrices = sizes[0], places = sizes[1];
  const auto* header = static_cast<const int64_t*>(of[0].data_ptr());
  RequirePlaces(name, position, places);
  const ffi::Tensor own = Part(tokens, sizes[2] * header[3], matrices * header[3]);  // elements of a token
  auto chosen =
      choose(of[1], of[2], Part(position, sizes[3], sizes[4]), matrices).cast<ffi::Array<ffi::Tensor>>();
  const ffi::Tensor nothing = HostTensor(ffi::Shape({0}), kFloat32);
  const ffi::Tensor unread = HostTensor(ffi::Shape({matrices}), kFloat32);
  Execute(of[0], chosen[0], chosen[1], cache, of[3], own, nothing, unread);
}

/*!
 * \brief Run a product over the first tokens of a cache: gathers its vectors from `x`, and its output `y` from the
 * results; elements of later tokens are zero.
 */
void Multiply(const std::vector<ffi::Tensor>& of, const ffi::Tensor& x, int64_t tokens, const ffi::Tensor& cache,
              const ffi::Tensor& y) {
  static ffi::Function commands = ffi::Function::GetGlobalRequired("pimflow.simulators.products_of_tokens");
  const auto made = commands(of[kProducts], of[kKinds], of[kChannels], of[kSizes], of[kLimits], tokens)
                        .cast<ffi::Array<ffi::Tensor>>();
  const ffi::Tensor operand = HostTensor(of[kTaken].shape(), kFloat32);
  const auto* which = static_cast<const int32_t*>(of[kTaken].data_ptr());
  const auto* from = static_cast<const float*>(x.data_ptr());
  auto* to = static_cast<float*>(operand.data_ptr());
  for (int64_t i = 0; i < operand.numel(); ++i) to[i] = which[i] < 0 ? 0.0f : from[which[i]];
  const auto* header = static_cast<const int64_t*>(of[kHeader].data_ptr());
  const ffi::Tensor results = HostTensor(ffi::Shape({header[0] * header[4]}), kFloat32);  // pixels, outputs
  Execute(of[kHeader], made[0], made[1], cache, of[kTable], operand, HostTensor(ffi::Shape({0}), kFloat32), results);
  TVM_FFI_ICHECK_EQ(y.numel(), of[kFound].numel()) << "the output does not fit the product";
  const auto* found = static_cast<const int32_t*>(of[kFound].data_ptr());
  const auto* begins = static_cast<const int32_t*>(of[kBegins].data_ptr());
  const auto* computed = static_cast<const float*>(results.data_ptr());
  auto* out = reinterpret_cast<float*>(const_cast<char*>(Begin(y)));
  const int64_t period = of[kBegins].numel();
  for (int64_t i = 0; i < y.numel(); ++i) out[i] = begins[i % period] < tokens ? computed[found[i]] : 0.0f;
}

/*! \brief The last `own` channels of an input, fp32. */
ffi::Tensor LastChannels(const ffi::Tensor& input, int64_t channels, int64_t own) {
  const int64_t pixels = input.numel() / channels;
  TVM_FFI_ICHECK(own > 0 && own <= channels && input.numel() == pixels * channels)
      << "a region's input does not have its channels";
  std::vector<int64_t> shape(input.shape().begin(), input.shape().end());
  shape.back() = own;
  const ffi::Tensor part = HostTensor(ffi::Shape(shape), kFloat32);
  const auto* from = reinterpret_cast<const float*>(Begin(input)) + channels - own;
  auto* to = static_cast<float*>(part.data_ptr());
  for (int64_t pixel = 0; pixel < pixels; ++pixel) to = std::copy_n(from + pixel * channels, own, to);
  return part;
}

/*! \brief The vectors of a region whose product adds a tensor: for each pixel the channels of both, fp32. */
struct Joined {
  Joined(const ffi::Tensor& input, const ffi::Tensor& added, int64_t added_channels) {
    const int64_t pixels = added.numel() / added_channels, own = pixels > 0 ? input.numel() / pixels : 0;
    TVM_FFI_ICHECK(added.numel() == pixels * added_channels && input.numel() == pixels * own)
        << "what a region adds does not fit its input";
    vectors = HostTensor(ffi::Shape({pixels, own + added_channels}), kFloat32);
    const auto* from = reinterpret_cast<const float*>(Begin(input));
    const auto* more = reinterpret_cast<const float*>(Begin(added));
    auto* to = static_cast<float*>(vectors.data_ptr());
    for (int64_t pixel = 0; pixel < pixels; ++pixel) {
      to = std::copy_n(from + pixel * own, own, to);
      to = std::copy_n(more + pixel * added_channels, added_channels, to);
    }
  }

  ffi::Tensor vectors;
};

class PimModuleObj : public ffi::ModuleObj {
 public:
  const char* kind() const final { return "pim"; }
  int GetPropertyMask() const final {
    return ffi::Module::kBinarySerializable | ffi::Module::kRunnable;
  }

  ffi::Optional<ffi::Function> GetFunction(const ffi::String& name) final {
    auto with_cache = caches.find(std::string(name));
    if (with_cache != caches.end()) return FunctionOf(name, &with_cache->second);
    auto found = regions.find(std::string(name));
    if (found == regions.end()) return std::nullopt;
    Region* region = &found->second;
    auto self = ffi::GetObjectPtr<ffi::Object>(static_cast<ffi::Object*>(this));
    return ffi::Function::FromPacked([self, region, name](ffi::PackedArgs args, ffi::Any*) {
      if (args.size() < 2) {
        TVM_FFI_THROW(TypeError) << "PIM region '" << name << "' takes an input and an output tensor";
      }
      auto x = args[0].cast<ffi::Tensor>(), y = args[args.size() - 1].cast<ffi::Tensor>();
      const bool adds = region->added_channels > 0, takes_initial = args.size() > 2 && !adds;
      if (adds && args.size() != 3) {
        TVM_FFI_THROW(TypeError) << "PIM region '" << name << "' takes an input, what it adds, and an output";
      }
      auto initial = takes_initial ? args[1].cast<ffi::Tensor>() : region->initial;
      auto added = adds ? args[1].cast<ffi::Tensor>() : x;
      for (const ffi::Tensor& each : {x, added, initial, y}) {
        TVM_FFI_ICHECK(each.dtype().code == kDLFloat && (each.dtype().bits == 32 || each.dtype().bits == 16))
            << "PIM region '" << name << "' takes tensors of fp32 or fp16";
      }
      if (TVMFFIEnvCheckSignals() != 0) throw ffi::EnvErrorAlreadySet();  // else Ctrl-C waits for the last region
      const bool in_place = IsHostFloat32(y);
      ffi::Tensor result = in_place ? y : HostTensor(y.shape(), kFloat32);
      const auto ready = [&](const ffi::Tensor& read) {
        return IsHostFloat32(read) && !Overlap(read, result) ? read : ToHost(read);
      };
      ffi::Tensor operand = ready(x);
      if (region->own_channels < region->input_channels) {
        operand = LastChannels(operand, region->input_channels, region->own_channels);
      }
      ffi::Tensor start = takes_initial ? ready(initial) : initial;
      ffi::Array<ffi::Tensor> operands{operand, start};
      if (adds) {
        operands.push_back(ready(added));
        operand = Joined(operand, operands[2], region->added_channels).vectors;
      }
      Execute(region->header, region->words, region->offsets, region->pages, region->table, operand, start,
              result);
      if (!in_place) FromHost(result, y);
      if (auto observer = Observer::OfThisProcess().Get()) (*observer)(name, operands, result);
    });
  }

  ffi::Bytes SaveToBytes() const final {
    Writer w;
    w.Put(kMagic);
    w.Put<uint64_t>(regions.size());
    for (auto [name, region] : regions) {
      w.PutAll(name);
      for (const ffi::Tensor* tensor : region.All()) PutTensor(*tensor, &w);
      for (int64_t channels : {region.own_channels, region.input_channels, region.added_channels}) w.Put(channels);
    }
    w.Put<uint64_t>(caches.size());
    for (const auto& [name, product] : caches) {
      w.PutAll(name);
      PutTensors(product.appends, &w);
      PutTensors(product.product, &w);
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
      for (int64_t* channels : {&region.own_channels, &region.input_channels, &region.added_channels}) {
        *channels = r.Get<int64_t>();
      }
      module->regions.emplace(std::move(name), std::move(region));
    }
    for (uint64_t i = r.Get<uint64_t>(); i > 0; --i) {
      std::string name;
      r.GetAll(&name);
      CacheProduct product;
      product.appends = GetTensors(&r);
      product.product = GetTensors(&r);
      TVM_FFI_ICHECK(product.appends.size() % kOfAppend == 0 && product.product.size() == kOfProduct)
          << "not a product of a PIM module";
      module->caches.emplace(std::move(name), std::move(product));
    }
    return ffi::Module(module);
  }

  std::map<std::string, Region> regions;
  std::map<std::string, CacheProduct> caches;

 private:
  ffi::Function FunctionOf(const ffi::String& name, const CacheProduct* product) {
    auto self = ffi::GetObjectPtr<ffi::Object>(static_cast<ffi::Object*>(this));
    return ffi::Function::FromPacked([self, product, name](ffi::PackedArgs args, ffi::Any*) {
      const auto appends = static_cast<int>(product->appends.size() / kOfAppend);
      const int count = std::max(appends, 1);  // caches
      if (args.size() != 3 + count + appends) {
        TVM_FFI_THROW(TypeError) << "'" << name << "' takes vectors, positions, caches, tokens and an output";
      }
      if (TVMFFIEnvCheckSignals() != 0) throw ffi::EnvErrorAlreadySet();
      ffi::Array<ffi::Tensor> operands{ToHost(args[0].cast<ffi::Tensor>()), OnHost(args[1].cast<ffi::Tensor>())};
      for (int i = 0; i < count; ++i) operands.push_back(OnHost(args[2 + i].cast<ffi::Tensor>()));
      for (int i = 0; i < appends; ++i) operands.push_back(ToHost(args[2 + count + i].cast<ffi::Tensor>()));
      for (int i = 0; i < appends; ++i) {
        Append(name, &product->appends[i * kOfAppend], operands[2 + count + i], operands[1], operands[2 + i]);
        auto cache = args[2 + i].cast<ffi::Tensor>();
        if (!cache.same_as(operands[2 + i])) CopyBetweenDevices(operands[2 + i], cache);
      }
      auto y = args[args.size() - 1].cast<ffi::Tensor>();
      const bool in_place = IsHostFloat32(y);
      ffi::Tensor result = in_place ? y : HostTensor(y.shape(), kFloat32);
      Multiply(product->product, operands[0], Tokens(operands[1]), operands[2], result);
      if (!in_place) FromHost(result, y);
      if (auto observer = Observer::OfThisProcess().Get()) (*observer)(name, operands, result);
    });
  }
};

ffi::Module CreateModule() { return ffi::Module(ffi::make_object<PimModuleObj>()); }

/*!
 * \brief Add a region to a module made by CreateModule.
 * \param pages [pages, elements per row, banks], bits of the storage type.
 * \param initial Initial values of latches, fp32 [oc]; empty for none, or if the second argument has them.
 * \param own_channels Channels of its vectors that come from its input, whose last they are.
 * \param input_channels Channels of its input.
 * \param added_channels Channels of its vectors that come from its second argument, which the product adds.
 */
void AddRegion(ffi::Module module, ffi::String symbol, ffi::TensorView header, ffi::TensorView words,
               ffi::TensorView offsets, ffi::TensorView pages, ffi::TensorView table, ffi::TensorView initial,
               int64_t own_channels, int64_t input_channels, int64_t added_channels) {
  auto* obj = static_cast<PimModuleObj*>(const_cast<ffi::ModuleObj*>(module.get()));
  Region region{Copy(header), Copy(words), Copy(offsets), Copy(pages), Copy(table), Copy(initial),
                own_channels, input_channels, added_channels};
  obj->regions[std::string(symbol)] = std::move(region);
}

/*!
 * \brief Add a product with a cache to a module made by CreateModule.
 * \param appends For each cache that it writes: header of a program of one step's WRITEs; words and offsets of the
 *   program that writes every place; its pages (int32 [channels, rows]); and as int64 the number of its matrices,
 *   the places of each, the index of its first matrix in the tokens, its first request, and its requests.
 * \param arrays Of the product itself, in the order of `OfProduct`: header of a program over the full cache; the
 *   arguments of `products_of_tokens`; index in the vectors of each element of its input (int32, -1 for zero); index
 *   in its results of each element of the output (int32); the first token with which each element of the output
 *   exists, cyclically (int32); pages of the cache (int32 [channels, rows]).
 */
void AddCacheProduct(ffi::Module module, ffi::String symbol, ffi::Array<ffi::Tensor> appends,
                     ffi::Array<ffi::Tensor> arrays) {
  TVM_FFI_ICHECK(appends.size() % kOfAppend == 0 && arrays.size() == kOfProduct);
  auto* obj = static_cast<PimModuleObj*>(const_cast<ffi::ModuleObj*>(module.get()));
  CacheProduct product;
  for (const ffi::Tensor& each : appends) product.appends.push_back(Copy(ffi::TensorView(each)));
  for (const ffi::Tensor& each : arrays) product.product.push_back(Copy(ffi::TensorView(each)));
  obj->caches[std::string(symbol)] = std::move(product);
}

TVM_FFI_STATIC_INIT_BLOCK() {
  namespace refl = tvm::ffi::reflection;
  refl::GlobalDef()
      .def("pimflow.runtime.create_module", CreateModule)
      .def("pimflow.runtime.add_region", AddRegion)
      .def("pimflow.runtime.add_cache_product", AddCacheProduct)
      .def("pimflow.runtime.set_observer",
           [](ffi::Optional<ffi::Function> observer) { Observer::OfThisProcess().Set(std::move(observer)); })
      .def("ffi.Module.load_from_bytes.pim", PimModuleObj::LoadFromBytes);
}

}  // namespace
}  // namespace pimflow
