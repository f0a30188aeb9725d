/*!
 * \brief Runtime module of compiled PIM regions: programs and bank contents, called by symbol.
 *
 * A region's function takes the layer's input, the initial values of its latches (unless the region has them), and
 * its output tensor, in fp32 or fp16, on the CPU or another device of TVM. A program of integers may also take int8
 * and give its sums, int32. It has the PIM device execute the region's program. This device is the function "pimflow.simulators.execute". It works on fp32 in host memory, so
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
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <map>
#include <mutex>
#include <numeric>
#include <sstream>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "../../simulators/src/program_header.h"
#include "host_tensors.h"
#include "serial.h"
#include "tensor_serial.h"

namespace pimflow {
namespace {

namespace ffi = tvm::ffi;

// "PIM10"; another number when a record that is stored changes: ProgramHeader, AppendSizes, those of products.cc.
constexpr uint64_t kProgramsMagic = 0x30314d4950ull;

/*! \brief What a region's function passes to the device: its program and the contents of the banks. */
struct Region {
  ffi::Tensor header, words, offsets;
  ffi::Tensor pages;  // bits [pages, elements per row, banks] of the storage type
  ffi::Tensor table;
  ffi::Tensor initial;  // initial values of latches, fp32 [oc]; empty if they start from zero or from a tensor
  ffi::Tensor scales;   // of a program of integers, the factor of each output, fp32 [oc]; else empty
  int64_t own_channels = 0;    // channels of its vectors that come from its input, whose last they are
  int64_t input_channels = 0;
  int64_t added_channels = 0;  // channels of its vectors that come from a tensor that the product adds

  std::array<ffi::Tensor*, 7> All() { return {&header, &words, &offsets, &pages, &table, &initial, &scales}; }
};

/*! \brief The header of a program of one step's WRITEs, the program that writes every place, its pages, sizes. */
PIMFLOW_RECORD(AppendTensors, ffi::Tensor, header, words, offsets, table, sizes);

/*! \brief Its matrices, the places of each, the index of its first matrix in the tokens, and its requests. */
PIMFLOW_RECORD(AppendSizes, int64_t, matrices, places, first_matrix, first_request, requests);

/*! \brief A product with a cache. */
PIMFLOW_RECORD(ProductTensors, ffi::Tensor,
               header,                                     // of a program over the full cache
               products, begins, channels, sizes, limits,  // arguments of `token_products`
               operand_indices,  // in the vectors, of each element of its input (int32, -1 for zero)
               result_indices,   // in its results, of each element of the output (int32)
               first_tokens,     // with which each element of the output exists, cyclically (int32)
               table);           // pages of the cache (int32 [channels, rows])

/*! \brief What the function of a product with a cache passes to the device. */
struct CacheProduct {
  std::vector<AppendTensors> appends;
  ProductTensors product;
};

/*! \brief The tensors of a record of tensors, in order: its fields are all that it has. */
template <typename Record>
std::vector<ffi::Tensor*> Tensors(Record* record) {
  std::vector<ffi::Tensor*> tensors(sizeof(Record) / sizeof(ffi::Tensor));
  std::iota(tensors.begin(), tensors.end(), reinterpret_cast<ffi::Tensor*>(record));
  return tensors;
}

/*! \brief Copies of the tensors of a record, by name. */
template <typename Record>
Record CopyTensors(const ffi::Map<ffi::String, ffi::Tensor>& by_name) {
  Record record;
  std::istringstream names(Record::kFields);
  for (ffi::Tensor* tensor : Tensors(&record)) {
    std::string name;
    std::getline(names >> std::ws, name, ',');
    const auto entry = by_name.find(name);
    TVM_FFI_ICHECK(entry != by_name.end()) << "no array '" << name << "' of " << Record::kFields;
    *tensor = Copy(ffi::TensorView((*entry).second));
  }
  return record;
}

/*! \brief Put records of tensors, with the number of these. */
template <typename Record>
void PutRecords(const std::vector<Record>& records, Writer* w) {
  w->Put<uint64_t>(records.size() * sizeof(Record) / sizeof(ffi::Tensor));
  for (Record record : records) {
    for (const ffi::Tensor* tensor : Tensors(&record)) PutTensor(*tensor, w);
  }
}

template <typename Record>
std::vector<Record> GetRecords(Reader* r) {
  constexpr uint64_t kTensors = sizeof(Record) / sizeof(ffi::Tensor);
  const uint64_t tensors = r->Get<uint64_t>();
  TVM_FFI_ICHECK_EQ(tensors % kTensors, 0u) << "not a product of a PIM module";
  std::vector<Record> records;
  for (uint64_t i = 0; i < tensors; i += kTensors) {
    records.emplace_back();
    for (ffi::Tensor* tensor : Tensors(&records.back())) *tensor = GetTensor(r);
  }
  return records;
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

  static Observer& Instance() {
    static Observer* observer = new Observer();  // Python may be gone when statics are destroyed
    return *observer;
  }

 private:
  std::mutex mutex_;
  ffi::Optional<ffi::Function> observer_;
};

void CheckPositions(const ffi::String& name, const ffi::Tensor& position, int64_t places) {
  TVM_FFI_ICHECK(position.dtype().code == kDLInt && position.dtype().bits == 64) << "positions are of int64";
  const auto* places_read = reinterpret_cast<const int64_t*>(DataBegin(position));
  for (int64_t i = 0; i < position.numel(); ++i) {
    if (places_read[i] < 0 || places_read[i] >= places) {
      TVM_FFI_THROW(ArtifactError) << "'" << name << "': there is no place " << places_read[i] << " in a cache of "
                                   << places << "; compile with a longer context";
    }
  }
}

/*! \brief Number of places of a cache that are read: up to the largest position. */
int64_t TokenCount(const ffi::Tensor& position) {
  const auto* places_read = reinterpret_cast<const int64_t*>(DataBegin(position));
  return *std::max_element(places_read, places_read + position.numel()) + 1;
}

/*! \brief Run a program on the device, with the rows in `pages`. */
void Execute(const ffi::Tensor& header, const ffi::Tensor& words, const ffi::Tensor& offsets,
             const ffi::Tensor& pages, const ffi::Tensor& table, const ffi::Tensor& input,
             const ffi::Tensor& initial, const ffi::Tensor& output) {
  static ffi::Function execute = ffi::Function::GetGlobalRequired("pimflow.simulators.execute");
  const int64_t threads = std::max(1u, std::thread::hardware_concurrency());
  execute(header, words, offsets, pages, table, input, initial, output, threads, ffi::String());
}

/*! \brief Write tokens at their positions in a cache. */
void Append(const ffi::String& name, const AppendTensors& append, const ffi::Tensor& tokens,
            const ffi::Tensor& position, const ffi::Tensor& cache) {
  static ffi::Function select_writes = ffi::Function::GetGlobalRequired("pimflow.simulators.step_writes");
  const AppendSizes& sizes = ReadRecord<AppendSizes>(append.sizes);
  const int64_t elements = ReadRecord<ProgramHeader>(append.header).c;  // of a token
  CheckPositions(name, position, sizes.places);
  const ffi::Tensor step_tokens = Part(tokens, sizes.first_matrix * elements, sizes.matrices * elements);
  const ffi::Tensor positions = Part(position, sizes.first_request, sizes.requests);
  const auto writes =
      select_writes(append.words, append.offsets, positions, sizes.matrices).cast<ffi::Array<ffi::Tensor>>();
  const ffi::Tensor no_initial = HostTensor(ffi::Shape({0}), kFloat32);
  const ffi::Tensor no_results = HostTensor(ffi::Shape({sizes.matrices}), kFloat32);
  Execute(append.header, writes[0], writes[1], cache, append.table, step_tokens, no_initial, no_results);
}

/*!
 * \brief Run a product over the first tokens of a cache: gathers its vectors from `x`, and its output `y` from the
 * results; elements of later tokens are zero.
 */
void Multiply(const ProductTensors& product, const ffi::Tensor& x, int64_t tokens, const ffi::Tensor& cache,
              const ffi::Tensor& y) {
  static ffi::Function select_products = ffi::Function::GetGlobalRequired("pimflow.simulators.token_products");
  const auto commands =
      select_products(product.products, product.begins, product.channels, product.sizes, product.limits, tokens)
          .cast<ffi::Array<ffi::Tensor>>();
  const ffi::Tensor operand = HostTensor(product.operand_indices.shape(), kFloat32);
  const auto* operand_indices = static_cast<const int32_t*>(product.operand_indices.data_ptr());
  const auto* from = static_cast<const float*>(x.data_ptr());
  auto* to = static_cast<float*>(operand.data_ptr());
  for (int64_t i = 0; i < operand.numel(); ++i) to[i] = operand_indices[i] < 0 ? 0.0f : from[operand_indices[i]];
  const ProgramHeader& header = ReadRecord<ProgramHeader>(product.header);
  const ffi::Tensor results = HostTensor(ffi::Shape({header.n * header.oc}), kFloat32);
  const ffi::Tensor no_initial = HostTensor(ffi::Shape({0}), kFloat32);
  Execute(product.header, commands[0], commands[1], cache, product.table, operand, no_initial, results);
  TVM_FFI_ICHECK_EQ(y.numel(), product.result_indices.numel()) << "the output does not fit the product";
  const auto* result_indices = static_cast<const int32_t*>(product.result_indices.data_ptr());
  const auto* first_tokens = static_cast<const int32_t*>(product.first_tokens.data_ptr());
  const auto* computed = static_cast<const float*>(results.data_ptr());
  auto* out = reinterpret_cast<float*>(const_cast<char*>(DataBegin(y)));
  const int64_t period = product.first_tokens.numel();
  for (int64_t i = 0; i < y.numel(); ++i) {
    out[i] = first_tokens[i % period] < tokens ? computed[result_indices[i]] : 0.0f;
  }
}

/*! \brief The last `count` channels of an input, fp32. */
ffi::Tensor LastChannels(const ffi::Tensor& input, int64_t channels, int64_t count) {
  const int64_t pixels = input.numel() / channels;
  TVM_FFI_ICHECK(count > 0 && count <= channels && input.numel() == pixels * channels)
      << "a region's input does not have its channels";
  std::vector<int64_t> shape(input.shape().begin(), input.shape().end());
  shape.back() = count;
  const ffi::Tensor part = HostTensor(ffi::Shape(shape), kFloat32);
  const auto* from = reinterpret_cast<const float*>(DataBegin(input)) + channels - count;
  auto* to = static_cast<float*>(part.data_ptr());
  for (int64_t pixel = 0; pixel < pixels; ++pixel) to = std::copy_n(from + pixel * channels, count, to);
  return part;
}

/*! \brief The vectors of a region whose product adds a tensor: for each pixel the channels of both, fp32. */
ffi::Tensor ConcatenateChannels(const ffi::Tensor& input, const ffi::Tensor& addend, int64_t addend_channels) {
  const int64_t pixels = addend.numel() / addend_channels, channels = pixels > 0 ? input.numel() / pixels : 0;
  TVM_FFI_ICHECK(addend.numel() == pixels * addend_channels && input.numel() == pixels * channels)
      << "what a region adds does not fit its input";
  const ffi::Tensor vectors = HostTensor(ffi::Shape({pixels, channels + addend_channels}), kFloat32);
  const auto* input_from = reinterpret_cast<const float*>(DataBegin(input));
  const auto* addend_from = reinterpret_cast<const float*>(DataBegin(addend));
  auto* to = static_cast<float*>(vectors.data_ptr());
  for (int64_t pixel = 0; pixel < pixels; ++pixel) {
    to = std::copy_n(input_from + pixel * channels, channels, to);
    to = std::copy_n(addend_from + pixel * addend_channels, addend_channels, to);
  }
  return vectors;
}

constexpr DLDataType kInt32{kDLInt, 32, 1};

/*! \brief Run a program of integers: operand and sums are int32 on the CPU. */
void SumIntegers(const Region& region, const ffi::Tensor& operand, const ffi::Tensor& sums) {
  const ffi::Tensor no_initial = HostTensor(ffi::Shape({0}), kInt32);
  Execute(region.header, region.words, region.offsets, region.pages, region.table, operand, no_initial, sums);
}

/*! \brief Run a program of integers: its operand holds whole numbers as fp32, and its sums are scaled by output. */
void ExecuteIntegers(const Region& region, const ffi::Tensor& operand, const ffi::Tensor& result) {
  const ffi::Tensor input = HostTensor(operand.shape(), kInt32), sums = HostTensor(result.shape(), kInt32);
  const auto* from = reinterpret_cast<const float*>(DataBegin(operand));
  auto* to = static_cast<int32_t*>(input.data_ptr());
  for (int64_t i = 0; i < operand.numel(); ++i) to[i] = static_cast<int32_t>(std::nearbyint(from[i]));
  SumIntegers(region, input, sums);
  const int64_t outputs = region.scales.numel();
  TVM_FFI_ICHECK(region.scales.dtype().code == kDLFloat && region.scales.dtype().bits == 32) << "scales are of fp32";
  TVM_FFI_ICHECK_EQ(result.numel() % outputs, 0) << "a region's result does not have its outputs";
  const auto* scales = static_cast<const float*>(region.scales.data_ptr());
  const auto* sum = static_cast<const int32_t*>(sums.data_ptr());
  auto* out = reinterpret_cast<float*>(const_cast<char*>(DataBegin(result)));
  for (int64_t i = 0; i < result.numel(); ++i) out[i] = static_cast<float>(sum[i]) * scales[i % outputs];
}

/*! \brief Run a program of integers on int8, with sums of int32, which is what `y` is of. Returns operand and sums. */
std::array<ffi::Tensor, 2> RunIntegers(const Region& region, const ffi::Tensor& x, const ffi::Tensor& y) {
  const ffi::Tensor host = ToCpu(x), operand = HostTensor(x.shape(), kInt32), sums = HostTensor(y.shape(), kInt32);
  const auto* from = reinterpret_cast<const int8_t*>(DataBegin(host));
  std::copy_n(from, x.numel(), static_cast<int32_t*>(operand.data_ptr()));
  SumIntegers(region, operand, sums);
  CopyBetweenDevices(sums, y);
  return {operand, sums};
}

bool IsOfType(const ffi::Tensor& tensor, uint8_t code, uint8_t bits) {
  return tensor.dtype().code == code && tensor.dtype().bits == bits;
}

class PimModuleObj : public ffi::ModuleObj {
 public:
  const char* kind() const final { return "pim"; }
  int GetPropertyMask() const final {
    return ffi::Module::kBinarySerializable | ffi::Module::kRunnable;
  }

  ffi::Optional<ffi::Function> GetFunction(const ffi::String& name) final {
    auto cache_product = caches.find(std::string(name));
    if (cache_product != caches.end()) return MakeCacheFunction(name, &cache_product->second);
    auto entry = regions.find(std::string(name));
    if (entry == regions.end()) return std::nullopt;
    Region* region = &entry->second;
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
      if (args.size() == 2 && IsOfType(x, kDLInt, 8) && IsOfType(y, kDLInt, 32)) {
        if (TVMFFIEnvCheckSignals() != 0) throw ffi::EnvErrorAlreadySet();
        const auto [operand, sums] = RunIntegers(*region, x, y);
        if (auto observer = Observer::Instance().Get()) {
          (*observer)(name, ffi::Array<ffi::Tensor>{operand, region->initial}, sums);
        }
        return;
      }
      auto initial = takes_initial ? args[1].cast<ffi::Tensor>() : region->initial;
      auto added = adds ? args[1].cast<ffi::Tensor>() : x;
      for (const ffi::Tensor& tensor : {x, added, initial, y}) {
        TVM_FFI_ICHECK(IsOfType(tensor, kDLFloat, 32) || IsOfType(tensor, kDLFloat, 16))
            << "PIM region '" << name << "' takes tensors of fp32 or fp16, or int8 and gives int32";
      }
      if (TVMFFIEnvCheckSignals() != 0) throw ffi::EnvErrorAlreadySet();  // else Ctrl-C waits for the last region
      const bool in_place = IsHostFloat32(y);
      ffi::Tensor result = in_place ? y : HostTensor(y.shape(), kFloat32);
      const auto ready = [&](const ffi::Tensor& read) {
        return IsHostFloat32(read) && !HasOverlap(read, result) ? read : ToHostFloat32(read);
      };
      ffi::Tensor operand = ready(x);
      if (region->own_channels < region->input_channels) {
        operand = LastChannels(operand, region->input_channels, region->own_channels);
      }
      ffi::Tensor start = takes_initial ? ready(initial) : initial;
      ffi::Array<ffi::Tensor> operands{operand, start};
      if (adds) {
        operands.push_back(ready(added));
        operand = ConcatenateChannels(operand, operands[2], region->added_channels);
      }
      if (region->scales.numel() > 0) {
        ExecuteIntegers(*region, operand, result);
      } else {
        Execute(region->header, region->words, region->offsets, region->pages, region->table, operand, start,
                result);
      }
      if (!in_place) CopyFromHostFloat32(result, y);
      if (auto observer = Observer::Instance().Get()) (*observer)(name, operands, result);
    });
  }

  ffi::Bytes SaveToBytes() const final {
    Writer w;
    w.Put(kProgramsMagic);
    w.Put<uint64_t>(regions.size());
    for (auto [name, region] : regions) {
      w.PutAll(name);
      for (const ffi::Tensor* tensor : region.All()) PutTensor(*tensor, &w);
      for (int64_t channels : {region.own_channels, region.input_channels, region.added_channels}) w.Put(channels);
    }
    w.Put<uint64_t>(caches.size());
    for (const auto& [name, product] : caches) {
      w.PutAll(name);
      PutRecords(product.appends, &w);
      PutRecords(std::vector<ProductTensors>{product.product}, &w);
    }
    return ffi::Bytes(w.out);
  }

  static ffi::Module LoadFromBytes(const ffi::Bytes& bytes) {
    Reader r(bytes);
    if (r.Get<uint64_t>() != kProgramsMagic) {
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
      std::vector<AppendTensors> appends = GetRecords<AppendTensors>(&r);
      std::vector<ProductTensors> products = GetRecords<ProductTensors>(&r);
      TVM_FFI_ICHECK_EQ(products.size(), 1u) << "not a product of a PIM module";
      module->caches.emplace(std::move(name), CacheProduct{std::move(appends), std::move(products.front())});
    }
    return ffi::Module(module);
  }

  std::map<std::string, Region> regions;
  std::map<std::string, CacheProduct> caches;

 private:
  ffi::Function MakeCacheFunction(const ffi::String& name, const CacheProduct* product) {
    auto self = ffi::GetObjectPtr<ffi::Object>(static_cast<ffi::Object*>(this));
    return ffi::Function::FromPacked([self, product, name](ffi::PackedArgs args, ffi::Any*) {
      const auto appends = static_cast<int>(product->appends.size());
      const int count = std::max(appends, 1);  // caches
      if (args.size() != 3 + count + appends) {
        TVM_FFI_THROW(TypeError) << "'" << name << "' takes vectors, positions, caches, tokens and an output";
      }
      if (TVMFFIEnvCheckSignals() != 0) throw ffi::EnvErrorAlreadySet();
      ffi::Array<ffi::Tensor> operands{ToHostFloat32(args[0].cast<ffi::Tensor>()), ToCpu(args[1].cast<ffi::Tensor>())};
      for (int i = 0; i < count; ++i) operands.push_back(ToCpu(args[2 + i].cast<ffi::Tensor>()));
      for (int i = 0; i < appends; ++i) operands.push_back(ToHostFloat32(args[2 + count + i].cast<ffi::Tensor>()));
      for (int i = 0; i < appends; ++i) {
        Append(name, product->appends[i], operands[2 + count + i], operands[1], operands[2 + i]);
        auto cache = args[2 + i].cast<ffi::Tensor>();
        if (!cache.same_as(operands[2 + i])) CopyBetweenDevices(operands[2 + i], cache);
      }
      auto y = args[args.size() - 1].cast<ffi::Tensor>();
      const bool in_place = IsHostFloat32(y);
      ffi::Tensor result = in_place ? y : HostTensor(y.shape(), kFloat32);
      Multiply(product->product, operands[0], TokenCount(operands[1]), operands[2], result);
      if (!in_place) CopyFromHostFloat32(result, y);
      if (auto observer = Observer::Instance().Get()) (*observer)(name, operands, result);
    });
  }
};

ffi::Module CreateModule() { return ffi::Module(ffi::make_object<PimModuleObj>()); }

/*!
 * \brief Add a region to a module made by CreateModule.
 * \param pages [pages, elements per row, banks], bits of the storage type.
 * \param initial Initial values of latches, fp32 [oc]; empty for none, or if the second argument has them.
 * \param scales Factors of the sums of a program of integers, fp32 [oc]; empty for other programs.
 * \param own_channels Channels of its vectors that come from its input, whose last they are.
 * \param input_channels Channels of its input.
 * \param added_channels Channels of its vectors that come from its second argument, which the product adds.
 */
void AddRegion(ffi::Module module, ffi::String symbol, ffi::TensorView header, ffi::TensorView words,
               ffi::TensorView offsets, ffi::TensorView pages, ffi::TensorView table, ffi::TensorView initial,
               ffi::TensorView scales, int64_t own_channels, int64_t input_channels, int64_t added_channels) {
  auto* obj = static_cast<PimModuleObj*>(const_cast<ffi::ModuleObj*>(module.get()));
  Region region{Copy(header), Copy(words), Copy(offsets), Copy(pages), Copy(table), Copy(initial),
                Copy(scales), own_channels, input_channels, added_channels};
  obj->regions[std::string(symbol)] = std::move(region);
}

using TensorsByName = ffi::Map<ffi::String, ffi::Tensor>;

/*!
 * \brief Add a product with a cache to a module made by CreateModule.
 * \param appends `AppendTensors` for each cache that it writes.
 * \param product `ProductTensors`.
 */
void AddCacheProduct(ffi::Module module, ffi::String symbol, ffi::Array<TensorsByName> appends, TensorsByName product) {
  auto* obj = static_cast<PimModuleObj*>(const_cast<ffi::ModuleObj*>(module.get()));
  CacheProduct cache_product{{}, CopyTensors<ProductTensors>(product)};
  for (const TensorsByName& append : appends) cache_product.appends.push_back(CopyTensors<AppendTensors>(append));
  obj->caches[std::string(symbol)] = std::move(cache_product);
}

TVM_FFI_STATIC_INIT_BLOCK() {
  namespace refl = tvm::ffi::reflection;
  DefineRecord<AppendSizes>("pimflow.runtime.append_sizes");
  refl::GlobalDef()
      .def("pimflow.runtime.create_module", CreateModule)
      .def("pimflow.runtime.add_region", AddRegion)
      .def("pimflow.runtime.add_cache_product", AddCacheProduct)
      .def("pimflow.runtime.set_observer",
           [](ffi::Optional<ffi::Function> observer) { Observer::Instance().Set(std::move(observer)); })
      .def("ffi.Module.load_from_bytes.pim", PimModuleObj::LoadFromBytes);
}

}  // namespace
}  // namespace pimflow
