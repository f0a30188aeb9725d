/*!
 * \brief Makes commands for products in a given order: for all, or for those of a cache's first tokens.
 *
 * The order alone decides the commands. A vector is written when a product needs it and no buffer holds it, a row
 * is opened when it is not open, and results are read when a product needs a latch and none is free.
 */
#include <tvm/ffi/container/array.h>
#include <tvm/ffi/container/tensor.h>
#include <tvm/ffi/reflection/registry.h>
#include <tvm/ffi/tvm_ffi.h>

#include <algorithm>
#include <array>
#include <map>
#include <utility>
#include <vector>

#include "words.h"

namespace pimflow {
namespace {

/*! \brief A product; see `BankProduct` in Python. `first` is where its operand begins along the tokens. */
PIMFLOW_RECORD(ProductRow, int32_t, pixel, pixels, k, columns, row, column, count, result_pixel, result_channel, first);

/*! \brief Sizes of a device and of a product with a cache that decide the commands; the latter are 0 for others. */
PIMFLOW_RECORD(ProductSizes, int64_t, buffers, accumulators, gangs, comp_starts_at_row, tokens_per_limit,
               chunk_columns,  // 0 if latches keep sums over all chunks
               shortens);      // whether the last products may be shorter

/*! \brief A channel of a product with a cache: its kind, and offsets of its pixels and of its outputs. */
PIMFLOW_RECORD(ProductChannel, int64_t, kind, pixel, output);

struct Product {
  std::array<int64_t, 4> vector;  // pixel, pixels, k, columns
  int64_t row, column, count;
  std::pair<int64_t, int64_t> result;  // pixel, channel
  int64_t first;

  explicit Product(const ProductRow& p)
      : vector{p.pixel, p.pixels, p.k, p.columns},
        row(p.row),
        column(p.column),
        count(p.count),
        result(p.result_pixel, p.result_channel),
        first(p.first) {}
};

/*! \brief The commands of one channel. */
class ProductStream {
 public:
  ProductStream(const ProductSizes& device, Numbers* words)
      : device_(device),
        words_(words),
        buffer_vectors_(device.buffers, -1),
        free_latches_(device.buffers),
        unfinished_(device.buffers, 0) {
    for (int64_t latch = 0; latch < device.buffers * device.accumulators; ++latch) {
      free_latches_[latch % device.buffers].push_back(latch);
    }
  }

  /*! \brief Append the commands for `products`, in order; call it once for each stream. */
  void AppendCommands(const std::vector<Product>& products) {
    const auto size = static_cast<int64_t>(products.size());
    Numbers vector(size), result(size), next_vector(size, -1), last_part;
    std::map<std::array<int64_t, 4>, int64_t> vectors;
    std::map<std::pair<int64_t, int64_t>, int64_t> results;
    for (int64_t index = 0; index < size; ++index) {
      vector[index] = vectors.emplace(products[index].vector, vectors.size()).first->second;
      result[index] = results.emplace(products[index].result, results.size()).first->second;
      if (vector[index] == static_cast<int64_t>(last_use_.size())) last_use_.push_back(index);
      if (result[index] == static_cast<int64_t>(last_part.size())) last_part.push_back(index);
      last_use_[vector[index]] = last_part[result[index]] = index;
    }
    for (int64_t index = size - 2; index >= 0; --index) {
      next_vector[index] = vector[index + 1] != vector[index] ? index + 1 : next_vector[index + 1];
    }
    latch_.assign(results.size(), -1);
    for (int64_t index = 0; index < size; ++index) {
      const Product& product = products[index];
      Compute(product, vector[index], result[index], index);
      if (last_part[result[index]] == index) {
        complete_results_.emplace_back(result[index], product.result);
        --unfinished_[latch_[result[index]] % device_.buffers];
      }
      const int64_t next = next_vector[index];
      if (next >= 0) WriteAhead(vector[next], products[next].vector, index);
    }
    ReadResults();
  }

 private:
  void Compute(const Product& product, int64_t vector, int64_t result, int64_t index) {
    const bool opens = product.row != row_;
    if (opens && !device_.comp_starts_at_row) Open(product.row);  // bus transfers are hidden behind it
    int64_t latch = latch_[result];
    const int64_t buffer = Buffer(vector, latch, index);
    if (latch < 0) {
      if (free_latches_[buffer].empty()) ReadResults();
      TVM_FFI_ICHECK(!free_latches_[buffer].empty()) << "an order of products that needs more latches";
      latch = latch_[result] = free_latches_[buffer].front();
      free_latches_[buffer].erase(free_latches_[buffer].begin());
      ++unfinished_[buffer];
    }
    if (buffer_vectors_[buffer] != vector) Write(buffer, vector, product.vector);
    if (opens && device_.comp_starts_at_row) Open(product.row);
    row_ = product.row;
    PutNode(words_, kComp, {latch}, {product.row, product.column}, {product.count});
  }

  /*! \brief The buffer for a vector: that of its sum, that which holds it, or one that is no longer needed. */
  int64_t Buffer(int64_t vector, int64_t latch, int64_t index) const {
    if (latch >= 0) return latch % device_.buffers;
    const auto entry = std::find(buffer_vectors_.begin(), buffer_vectors_.end(), vector);
    if (entry != buffer_vectors_.end()) return entry - buffer_vectors_.begin();
    int64_t best = 0;
    for (int64_t buffer = 1; buffer < device_.buffers; ++buffer) {
      if (LastUse(buffer, index) < LastUse(best, index)) best = buffer;
    }
    return best;
  }

  int64_t LastUse(int64_t buffer, int64_t index) const {
    const int64_t vector = buffer_vectors_[buffer];
    return vector < 0 || last_use_[vector] < index ? -1 : last_use_[vector];
  }

  /*! \brief Write the next vector into a buffer that is no longer needed, while other products are computed. */
  void WriteAhead(int64_t vector, const std::array<int64_t, 4>& words, int64_t index) {
    if (std::find(buffer_vectors_.begin(), buffer_vectors_.end(), vector) != buffer_vectors_.end()) return;
    for (int64_t buffer = 0; buffer < device_.buffers; ++buffer) {
      if (LastUse(buffer, index + 1) < 0 && unfinished_[buffer] == 0) {
        Write(buffer, vector, words);
        return;
      }
    }
  }

  void Write(int64_t buffer, int64_t vector, const std::array<int64_t, 4>& fields) {
    buffer_vectors_[buffer] = vector;
    PutNode(words_, kGwrite, {buffer}, {fields[0]}, {fields[1]}, {fields[2]}, {fields[3]});
  }

  void Open(int64_t row) {
    for (int64_t gang = 0; gang < device_.gangs; ++gang) PutNode(words_, kGAct, {gang}, {row});
  }

  /*! \brief Read all complete results. */
  void ReadResults() {
    for (const auto& [result, output] : complete_results_) {
      const int64_t latch = latch_[result];
      latch_[result] = -1;
      free_latches_[latch % device_.buffers].push_back(latch);
      PutNode(words_, kReadres, {latch}, {output.first, output.second});
    }
    for (Numbers& latches : free_latches_) std::sort(latches.begin(), latches.end());
    complete_results_.clear();
  }

  const ProductSizes& device_;
  Numbers* words_;
  Numbers last_use_;            // last product that uses each vector
  Numbers latch_;               // latch of each result; -1 while it has none
  Numbers buffer_vectors_;      // vector in each buffer; -1 for none
  std::vector<Numbers> free_latches_;  // latches of each buffer
  Numbers unfinished_;          // number of latches of each buffer whose sums are not complete
  std::vector<std::pair<int64_t, std::pair<int64_t, int64_t>>> complete_results_;  // results, pixel and channel
  int64_t row_ = -1;
};

/*! \brief Words of the commands of one channel; `products` has a `ProductRow` in each row. */
ffi::Tensor ProductCommands(ffi::TensorView products, ffi::TensorView sizes) {
  const RecordTable<ProductRow> table(products);
  Numbers stream_words;
  ProductStream(ReadRecord<ProductSizes>(sizes), &stream_words).AppendCommands({table.begin(), table.end()});
  return WordTensor(stream_words);
}

/*! \brief The products [begin, end) of a cache that are computed for some tokens. */
struct ProductRange {
  const ProductRow *begin, *end;
  const ProductChannel& channel;
  bool shortens;

  /*! \brief Those whose operands begin in [first, limit); if it `shortens`, they are shortened to its end. */
  std::vector<Product> Select(int64_t first, int64_t limit) const {
    std::vector<Product> selected;
    for (const ProductRow* row = begin; row < end; ++row) {
      Product product(*row);
      product.vector[0] += channel.pixel, product.result.first += channel.pixel;
      product.result.second += channel.output, product.first += channel.output;
      if (product.first < first || product.first >= limit) continue;
      if (shortens && product.first + product.count > limit) {
        product.count = limit - product.first;
        // Vectors that share a buffer keep their width, so only a single vector is shortened.
        if (product.vector[1] == 1) product.vector[3] = product.count;
      }
      selected.push_back(product);
    }
    return selected;
  }
};

/*!
 * \brief Words and offsets of the commands of a product with a cache that holds `tokens` tokens.
 * \param products, begins The products over a full cache for each kind of channel (`ProductRow`), and where each kind
 *   begins.
 * \param channels, sizes `ProductChannel`, a row each; `ProductSizes`.
 * \param limits Where the operands end, for each possible number of tokens. An incomplete chunk comes last, with
 *   separate commands.
 */
ffi::Array<ffi::Tensor> TokenProductCommands(ffi::TensorView products, ffi::TensorView begins, ffi::TensorView channels,
                                             ffi::TensorView sizes, ffi::TensorView limits, int64_t tokens) {
  const ProductSizes& size = ReadRecord<ProductSizes>(sizes);
  const int64_t index = (tokens - 1) / size.tokens_per_limit;
  TVM_FFI_ICHECK(tokens > 0 && index < limits.numel()) << "more tokens than a cache holds";
  const int64_t limit = TensorData<const int64_t>(limits)[index], chunk = size.chunk_columns;
  const int64_t whole_limit = chunk > 0 ? limit / chunk * chunk : limit;
  const ProductRow* rows = RecordTable<ProductRow>(products).begin();
  const auto* begin = TensorData<const int64_t>(begins);
  Numbers stream_words, stream_offsets{0};
  for (const ProductChannel& channel : RecordTable<ProductChannel>(channels)) {
    const ProductRange range{rows + begin[channel.kind], rows + begin[channel.kind + 1], channel, size.shortens != 0};
    ProductStream(size, &stream_words).AppendCommands(range.Select(0, whole_limit));
    if (whole_limit < limit) ProductStream(size, &stream_words).AppendCommands(range.Select(whole_limit, limit));
    stream_offsets.push_back(static_cast<int64_t>(stream_words.size()));
  }
  return {WordTensor(stream_words), WordTensor(stream_offsets)};
}

TVM_FFI_STATIC_INIT_BLOCK() {
  DefineRecord<ProductRow>("pimflow.simulators.product");
  DefineRecord<ProductSizes>("pimflow.simulators.product_sizes");
  DefineRecord<ProductChannel>("pimflow.simulators.product_channel");
  tvm::ffi::reflection::GlobalDef()
      .def("pimflow.simulators.product_commands", ProductCommands)
      .def("pimflow.simulators.token_products", TokenProductCommands);
}

}  // namespace
}  // namespace pimflow
