/*!
 * \brief DRAM-PIM by value: executes the commands of one channel on banks, buffers and latches.
 *
 * Its only inputs are the encoded program, the memory image and the input tensor. Operands are of the
 * storage type, products and sums are fp32 in a fixed order: an adder tree over the pairs (2i, 2i+1)
 * of a column's products, then one accumulation per COMP. READRES rounds to the storage type.
 */
#include <tvm/ffi/container/tensor.h>
#include <tvm/ffi/tvm_ffi.h>

#include <algorithm>
#include <atomic>
#include <cstring>
#include <limits>
#include <string>
#include <thread>
#include <vector>

#include "program.h"

namespace pimflow {
namespace {

namespace ffi = tvm::ffi;

/*! \brief Order of the words in which Python passes a program's header. */
struct Header {
  int64_t n, h, w, c, oc, kh, kw;
  int64_t stride_h, stride_w, dilation_h, dilation_w, pad_top, pad_left, oh, ow;
  int64_t pixel_begin, pixel_end;
  int64_t banks, gangs, columns, elements_per_column, buffers, row_begin, rows;
  int64_t half;  // 1: fp16 storage, 0: fp32
};

/*! \brief Nearest fp16 value, ties to even; overflow gives infinity. */
inline float RoundToHalf(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, 4);
  const uint32_t sign = bits & 0x80000000u, magnitude = bits ^ sign;
  float result;
  if (magnitude >= 0x7f800000u) return value;  // infinity, NaN
  if (magnitude < 0x38800000u) {               // below 2^-14: fixed step of 2^-24
    std::memcpy(&result, &magnitude, 4);
    result = (result + 0.5f) - 0.5f;  // the sum's last bit is 2^-24
  } else {
    uint32_t rounded = magnitude + 0xfffu + ((magnitude >> 13) & 1u);
    rounded &= ~0x1fffu;
    if (rounded >= 0x47800000u) rounded = 0x7f800000u;  // 65520 and above
    std::memcpy(&result, &rounded, 4);
  }
  std::memcpy(&bits, &result, 4);
  bits |= sign;
  std::memcpy(&result, &bits, 4);
  return result;
}

#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__)
#define PIMFLOW_CLONES __attribute__((target_clones("avx512f", "avx2", "default")))
#else
#define PIMFLOW_CLONES
#endif

/*!
 * \brief `count` COMPs: latch[b] += tree(weights[column][e][b] * vector[column][e]).
 *
 * Lanes are banks, so vector width never changes the order of a sum.
 */
template <int kBanks, int kElements>
inline void CompRun(const float* __restrict weights, const float* __restrict vector, int64_t count,
                    float* __restrict latch) {
  for (int64_t column = 0; column < count; ++column) {
    float partial[kElements / 2][kBanks];
    for (int i = 0; i < kElements / 2; ++i) {
      const float x0 = vector[2 * i], x1 = vector[2 * i + 1];
      for (int b = 0; b < kBanks; ++b) {
        partial[i][b] = weights[2 * i * kBanks + b] * x0 + weights[(2 * i + 1) * kBanks + b] * x1;
      }
    }
    for (int width = kElements / 4; width >= 1; width /= 2) {
      for (int i = 0; i < width; ++i) {
        for (int b = 0; b < kBanks; ++b) partial[i][b] = partial[2 * i][b] + partial[2 * i + 1][b];
      }
    }
    for (int b = 0; b < kBanks; ++b) latch[b] += partial[0][b];
    weights += kElements * kBanks;
    vector += kElements;
  }
}

PIMFLOW_CLONES
void CompRun16x16(const float* weights, const float* vector, int64_t count, float* latch) {
  CompRun<16, 16>(weights, vector, count, latch);
}

PIMFLOW_CLONES
void CompRun16x8(const float* weights, const float* vector, int64_t count, float* latch) {
  CompRun<16, 8>(weights, vector, count, latch);
}

/*! \brief The same for any organisation, over banks [bank, bank + lanes). */
void CompRunAny(const float* weights, const float* vector, int64_t count, int64_t banks,
                int64_t elements, int64_t bank, int64_t lanes, float* latch) {
  std::vector<float> tree(elements);
  for (int64_t column = 0; column < count; ++column) {
    for (int64_t b = bank; b < bank + lanes; ++b) {
      for (int64_t e = 0; e < elements; ++e) tree[e] = weights[e * banks + b] * vector[e];
      for (int64_t width = elements; width > 1; width = (width + 1) / 2) {
        for (int64_t i = 0; i < width / 2; ++i) tree[i] = tree[2 * i] + tree[2 * i + 1];
        if (width % 2) tree[width / 2] = tree[width - 1];
      }
      latch[b] += tree[0];
    }
    weights += elements * banks;
    vector += elements;
  }
}

/*! \brief One channel: banks, global buffers and result latches. */
class Channel {
 public:
  Channel(const Header& header, const float* pages, const int32_t* table, const float* input,
          float* output)
      : h_(header),
        pages_(pages),
        table_(table),
        input_(input),
        output_(output),
        row_elements_(header.columns * header.elements_per_column),
        buffers_(header.buffers * row_elements_, 0.0f),
        latches_(header.buffers * header.banks, 0.0f),
        zeros_(row_elements_ * header.banks, 0.0f),
        open_(header.gangs, nullptr) {}

  void Gwrite(int64_t buffer, int64_t pixel, int64_t pixels, int64_t k, int64_t columns) {
    float* out = &buffers_[buffer * row_elements_];
    const int64_t elements = columns * h_.elements_per_column;
    for (int64_t slot = 0; slot < pixels; ++slot) Gather(pixel + slot, k, elements, out + slot * elements);
  }

  void GAct(int64_t gang, int64_t row) {
    const int64_t local = row - h_.row_begin;
    const int32_t page = local >= 0 && local < h_.rows ? table_[local] : -1;
    open_[gang] = page < 0 ? zeros_.data() : pages_ + page * row_elements_ * h_.banks;
  }

  void Comp(int64_t buffer, int64_t /*row: whatever is open*/, int64_t column, int64_t count) {
    const int64_t elements = h_.elements_per_column, first = column * elements;
    const float* vector = &buffers_[buffer * row_elements_ + first];
    float* latch = &latches_[buffer * h_.banks];
    const bool together =
        open_[0] && std::all_of(open_.begin(), open_.end(), [&](const float* p) { return p == open_[0]; });
    if (together && h_.banks == 16 && elements == 16) {
      CompRun16x16(open_[0] + first * 16, vector, count, latch);
    } else if (together && h_.banks == 16 && elements == 8) {
      CompRun16x8(open_[0] + first * 16, vector, count, latch);
    } else {
      const int64_t lanes = h_.banks / h_.gangs;
      for (int64_t gang = 0; gang < h_.gangs; ++gang) {
        if (!open_[gang]) continue;
        CompRunAny(open_[gang] + first * h_.banks, vector, count, h_.banks, elements, gang * lanes, lanes,
                   latch);
      }
    }
  }

  void Readres(int64_t buffer, int64_t pixel, int64_t channel) {
    float* latch = &latches_[buffer * h_.banks];
    float* out = output_ + (pixel - h_.pixel_begin) * h_.oc;
    const int64_t valid = std::min(h_.banks, h_.oc - channel);
    for (int64_t b = 0; b < valid; ++b) out[channel + b] = h_.half ? RoundToHalf(latch[b]) : latch[b];
    std::fill(latch, latch + h_.banks, 0.0f);
  }

 private:
  /*! \brief Elements [k, k + count) of the im2col vector of a pixel, in (kh, kw, c) order. */
  void Gather(int64_t pixel, int64_t k, int64_t count, float* out) const {
    const int64_t ow = pixel % h_.ow, oh = pixel / h_.ow % h_.oh, n = pixel / (h_.ow * h_.oh);
    const int64_t reduction = h_.kh * h_.kw * h_.c, end = k + count;
    while (k < end) {
      if (k >= reduction) {
        std::fill(out, out + (end - k), 0.0f);
        return;
      }
      const int64_t c = k % h_.c, tap = k / h_.c;
      const int64_t run = std::min(h_.c - c, end - k);
      const int64_t y = oh * h_.stride_h - h_.pad_top + tap / h_.kw * h_.dilation_h;
      const int64_t x = ow * h_.stride_w - h_.pad_left + tap % h_.kw * h_.dilation_w;
      if (y < 0 || y >= h_.h || x < 0 || x >= h_.w) {
        std::fill(out, out + run, 0.0f);
      } else {
        std::memcpy(out, input_ + ((n * h_.h + y) * h_.w + x) * h_.c + c, run * sizeof(float));
      }
      k += run;
      out += run;
    }
  }

  const Header& h_;
  const float* pages_;
  const int32_t* table_;
  const float* input_;
  float* output_;
  const int64_t row_elements_;
  std::vector<float> buffers_, latches_, zeros_;
  std::vector<const float*> open_;
};

template <typename T>
T* Data(const ffi::TensorView& tensor) {
  return reinterpret_cast<T*>(static_cast<char*>(tensor.data_ptr()) + tensor.byte_offset());
}

/*!
 * \brief Execute all channels of a program.
 * \param header Words of Header.
 * \param words All channels' encoded streams, one behind the other.
 * \param offsets [channels + 1] where each begins.
 * \param pages [pages, columns, elements per column, banks] fp32, of values of the storage type.
 * \param table [channels, rows] int32: page in each row, -1 for none.
 * \param input [n, h, w, c] fp32, rounded to the storage type on its way to the memory.
 * \param output [pixel_end - pixel_begin, oc] fp32; elements that no READRES delivers stay NaN.
 * \param threads Channels executed at a time; values do not depend on it.
 */
void Execute(ffi::TensorView header, ffi::TensorView words, ffi::TensorView offsets,
             ffi::TensorView pages, ffi::TensorView table, ffi::TensorView input,
             ffi::TensorView output, int64_t threads) {
  TVM_FFI_ICHECK_EQ(header.numel() * sizeof(int64_t), sizeof(Header)) << "bad program header";
  Header h;
  std::memcpy(&h, header.data_ptr(), sizeof(Header));
  TVM_FFI_ICHECK_EQ(input.numel(), h.n * h.h * h.w * h.c) << "input tensor does not fit the program";
  TVM_FFI_ICHECK_EQ(output.numel(), (h.pixel_end - h.pixel_begin) * h.oc)
      << "output tensor does not fit the program";
  const auto* in = Data<const float>(input);
  std::vector<float> rounded;
  if (h.half) {
    rounded.resize(input.numel());
    for (size_t i = 0; i < rounded.size(); ++i) rounded[i] = RoundToHalf(in[i]);
    in = rounded.data();
  }
  auto* out = Data<float>(output);
  std::fill(out, out + output.numel(), std::numeric_limits<float>::quiet_NaN());

  const auto* stream = static_cast<const int64_t*>(words.data_ptr());
  const auto* begin = static_cast<const int64_t*>(offsets.data_ptr());
  const auto* page = static_cast<const float*>(pages.data_ptr());
  const auto* rows = static_cast<const int32_t*>(table.data_ptr());
  const int64_t channels = offsets.numel() - 1;
  std::atomic<int64_t> next{0};
  auto work = [&]() {
    for (int64_t i = next++; i < channels; i = next++) {
      Channel channel(h, page, rows + i * h.rows, in, out);
      Walk(stream + begin[i], begin[i + 1] - begin[i], &channel);
    }
  };
  std::vector<std::thread> pool;
  for (int64_t t = 1; t < std::min(threads, channels); ++t) pool.emplace_back(work);
  work();
  for (auto& thread : pool) thread.join();
}

void RoundTensorToHalf(ffi::TensorView values) {
  auto* data = static_cast<float*>(values.data_ptr());
  for (int64_t i = 0; i < values.numel(); ++i) data[i] = RoundToHalf(data[i]);
}

TVM_FFI_STATIC_INIT_BLOCK() {
  namespace refl = tvm::ffi::reflection;
  refl::GlobalDef()
      .def("pimflow.simulators.execute", Execute)
      .def("pimflow.simulators.round_to_half", RoundTensorToHalf);
}

}  // namespace
}  // namespace pimflow
