/*!
 * \brief Makes commands for products in a given order: for all, or for those of a cache's first tokens.
 *
 * The order alone decides the commands. A vector is written when a product needs it and no buffer holds it, a row
 * is opened when it is not open, and results are read when a product needs a latch and none is free.
 *
 * A product is kProductWords int32: pixel, pixels, k and columns of its vector, then row, column, count, pixel and
 * channel of its sums, and where its operand begins along the tokens; see `Product` in Python.
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

constexpr int64_t kProductWords = 10;

struct Product {
  std::array<int64_t, 4> vector;  // pixel, pixels, k, columns
  int64_t row, column, count;
  std::pair<int64_t, int64_t> result;  // pixel, channel
  int64_t first;
};

Product ProductAt(const int32_t* w) {
  return Product{{w[0], w[1], w[2], w[3]}, w[4], w[5], w[6], {w[7], w[8]}, w[9]};
}

/*! \brief Sizes of a device that decide the commands; the first words of `sizes`. */
struct Device {
  explicit Device(const int64_t* sizes)
      : buffers(sizes[0]), accumulators(sizes[1]), gangs(sizes[2]), comp_starts_at_row(sizes[3] != 0) {}

  static constexpr int64_t kWords = 4;
  int64_t buffers, accumulators, gangs;
  bool comp_starts_at_row;
};

/*! \brief The commands of one channel. */
class Stream {
 public:
  Stream(const Device& device, Numbers* words)
      : device_(device),
        words_(words),
        held_(device.buffers, -1),
        free_(device.buffers),
        unfinished_(device.buffers, 0) {
    for (int64_t latch = 0; latch < device.buffers * device.accumulators; ++latch) {
      free_[latch % device.buffers].push_back(latch);
    }
  }

  /*! \brief Append the commands for `products`, in order; call it once for each stream. */
  void Commands(const std::vector<Product>& products) {
    const auto size = static_cast<int64_t>(products.size());
    Numbers vector(size), result(size), following(size, -1), last_part;
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
      following[index] = vector[index + 1] != vector[index] ? index + 1 : following[index + 1];
    }
    latch_.assign(results.size(), -1);
    for (int64_t index = 0; index < size; ++index) {
      const Product& product = products[index];
      Compute(product, vector[index], result[index], index);
      if (last_part[result[index]] == index) {
        done_.emplace_back(result[index], product.result);
        --unfinished_[latch_[result[index]] % device_.buffers];
      }
      const int64_t next = following[index];
      if (next >= 0) Ahead(vector[next], products[next].vector, index);
    }
    Read();
  }

 private:
  void Compute(const Product& product, int64_t vector, int64_t result, int64_t index) {
    const bool opens = product.row != row_;
    if (opens && !device_.comp_starts_at_row) Open(product.row);  // bus transfers are hidden behind it
    int64_t latch = latch_[result];
    const int64_t buffer = Buffer(vector, latch, index);
    if (latch < 0) {
      if (free_[buffer].empty()) Read();
      TVM_FFI_ICHECK(!free_[buffer].empty()) << "an order of products that needs more latches";
      latch = latch_[result] = free_[buffer].front();
      free_[buffer].erase(free_[buffer].begin());
      ++unfinished_[buffer];
    }
    if (held_[buffer] != vector) Write(buffer, vector, product.vector);
    if (opens && device_.comp_starts_at_row) Open(product.row);
    row_ = product.row;
    PutNode(words_, kComp, {latch}, {product.row, product.column}, {product.count});
  }

  /*! \brief The buffer for a vector: that of its sum, that which holds it, or one that is no longer needed. */
  int64_t Buffer(int64_t vector, int64_t latch, int64_t index) const {
    if (latch >= 0) return latch % device_.buffers;
    const auto found = std::find(held_.begin(), held_.end(), vector);
    if (found != held_.end()) return found - held_.begin();
    int64_t best = 0;
    for (int64_t buffer = 1; buffer < device_.buffers; ++buffer) {
      if (NeededUntil(buffer, index) < NeededUntil(best, index)) best = buffer;
    }
    return best;
  }

  int64_t NeededUntil(int64_t buffer, int64_t index) const {
    const int64_t vector = held_[buffer];
    return vector < 0 || last_use_[vector] < index ? -1 : last_use_[vector];
  }

  /*! \brief Write the next vector into a buffer that is no longer needed, while other products are computed. */
  void Ahead(int64_t vector, const std::array<int64_t, 4>& words, int64_t index) {
    if (std::find(held_.begin(), held_.end(), vector) != held_.end()) return;
    for (int64_t buffer = 0; buffer < device_.buffers; ++buffer) {
      if (NeededUntil(buffer, index + 1) < 0 && unfinished_[buffer] == 0) {
        Write(buffer, vector, words);
        return;
      }
    }
  }

  void Write(int64_t buffer, int64_t vector, const std::array<int64_t, 4>& v) {
    held_[buffer] = vector;
    PutNode(words_, kGwrite, {buffer}, {v[0]}, {v[1]}, {v[2]}, {v[3]});
  }

  void Open(int64_t row) {
    for (int64_t gang = 0; gang < device_.gangs; ++gang) PutNode(words_, kGAct, {gang}, {row});
  }

  /*! \brief Read all complete results. */
  void Read() {
    for (const auto& [result, where] : done_) {
      const int64_t latch = latch_[result];
      latch_[result] = -1;
      free_[latch % device_.buffers].push_back(latch);
      PutNode(words_, kReadres, {latch}, {where.first, where.second});
    }
    for (Numbers& latches : free_) std::sort(latches.begin(), latches.end());
    done_.clear();
  }

  const Device& device_;
  Numbers* words_;
  Numbers last_use_;            // last product that uses each vector
  Numbers latch_;               // latch of each result; -1 while it has none
  Numbers held_;                // vector in each buffer; -1 for none
  std::vector<Numbers> free_;   // latches of each buffer
  Numbers unfinished_;          // number of latches of each buffer whose sums are not complete
  std::vector<std::pair<int64_t, std::pair<int64_t, int64_t>>> done_;  // results, pixel and channel
  int64_t row_ = -1;
};

template <typename T>
const T* Data(const ffi::TensorView& tensor) {
  return reinterpret_cast<const T*>(static_cast<const char*>(tensor.data_ptr()) + tensor.byte_offset());
}

/*!
 * \brief Words of the commands of one channel.
 * \param products [products, kProductWords] int32.
 * \param sizes Those of `Device`, int64.
 */
ffi::Tensor ProductCommands(ffi::TensorView products, ffi::TensorView sizes) {
  const auto* words = Data<int32_t>(products);
  std::vector<Product> all;
  for (int64_t at = 0; at < products.numel(); at += kProductWords) all.push_back(ProductAt(words + at));
  const Device device(Data<int64_t>(sizes));
  Numbers made;
  Stream(device, &made).Commands(all);
  return WordTensor(made);
}

/*! \brief Products of a cache whose operands begin in a range; with `cut`, they are shortened to its end. */
std::vector<Product> Of(const int32_t* words, const int32_t* end, const int64_t* channel, int64_t from,
                        int64_t limit, bool cut) {
  std::vector<Product> found;
  for (; words < end; words += kProductWords) {
    Product product = ProductAt(words);
    product.vector[0] += channel[1], product.result.first += channel[1];
    product.result.second += channel[2], product.first += channel[2];
    if (product.first < from || product.first >= limit) continue;
    if (cut && product.first + product.count > limit) {
      product.count = limit - product.first;
      // Vectors that share a buffer keep their width, so only a single vector is shortened.
      if (product.vector[1] == 1) product.vector[3] = product.count;
    }
    found.push_back(product);
  }
  return found;
}

/*!
 * \brief Words and offsets of the commands of a product with a cache that holds `tokens` tokens.
 * \param products, begins The products over a full cache for each kind of channel, and where each kind begins.
 * \param channels [channels, 3]: kind, and offsets of its pixels and of its outputs.
 * \param sizes Those of `Device`; then the tokens for each of `limits`, the columns of a chunk (0 if latches keep
 *   sums over all chunks), and whether the last products may be shorter.
 * \param limits Where the operands end, for each possible number of tokens. An incomplete chunk comes last, with
 *   separate commands.
 */
ffi::Array<ffi::Tensor> ProductsOfTokens(ffi::TensorView products, ffi::TensorView begins,
                                         ffi::TensorView channels, ffi::TensorView sizes,
                                         ffi::TensorView limits, int64_t tokens) {
  const auto* size = Data<int64_t>(sizes);
  const Device device(size);
  const int64_t period = size[Device::kWords], chunk = size[Device::kWords + 1];
  const bool cut = size[Device::kWords + 2] != 0;
  TVM_FFI_ICHECK(tokens > 0 && (tokens - 1) / period < limits.numel()) << "more tokens than a cache holds";
  const int64_t limit = Data<int64_t>(limits)[(tokens - 1) / period];
  const int64_t whole = chunk > 0 ? limit / chunk * chunk : limit;
  const auto* words = Data<int32_t>(products);
  const auto* begin = Data<int64_t>(begins);
  Numbers made, starts{0};
  for (int64_t index = 0; index < channels.size(0); ++index) {
    const int64_t* channel = Data<int64_t>(channels) + index * 3;
    const int32_t *first = words + begin[channel[0]] * kProductWords,
                  *end = words + begin[channel[0] + 1] * kProductWords;
    Stream(device, &made).Commands(Of(first, end, channel, 0, whole, cut));
    if (whole < limit) Stream(device, &made).Commands(Of(first, end, channel, whole, limit, cut));
    starts.push_back(static_cast<int64_t>(made.size()));
  }
  return {WordTensor(made), WordTensor(starts)};
}

TVM_FFI_STATIC_INIT_BLOCK() {
  tvm::ffi::reflection::GlobalDef()
      .def("pimflow.simulators.product_commands", ProductCommands)
      .def("pimflow.simulators.products_of_tokens", ProductsOfTokens);
}

}  // namespace
}  // namespace pimflow
