/*!
 * \brief Functional simulation of DRAM-PIM: executes a channel's commands on banks, buffers and latches.
 *
 * Its only inputs are the encoded program, the memory image, the input tensor and the initial values of latches.
 * Operands have the storage type. Products and sums are fp32 (int32 for int8), in a fixed order: an adder
 * tree over the pairs (2i, 2i+1) of a column's products, then one accumulation per COMP. READRES and AF round to
 * the storage type; int8 gives the int32 sums. lanes.h does the arithmetic.
 */
#include <tvm/ffi/container/array.h>
#include <tvm/ffi/container/tensor.h>
#include <tvm/ffi/tvm_ffi.h>

#include <algorithm>
#include <atomic>
#include <cfenv>
#include <cstring>
#include <limits>
#include <memory>
#include <new>
#include <string>
#include <vector>

#include "half.h"
#include "lanes.h"
#include "program.h"
#include "workers.h"

namespace pimflow {
namespace {

namespace ffi = tvm::ffi;

/*! \brief Order of the words in which Python passes a program's header. */
struct Header {
  int64_t n, h, w, c, oc, kh, kw;
  int64_t stride_h, stride_w, dilation_h, dilation_w, pad_top, pad_left, oh, ow;
  int64_t pixel_begin, pixel_end;
  int64_t banks, gangs, columns, elements_per_column, buffers, row_begin, rows;
  int64_t storage;  // a Storage
  int64_t buffer_columns;
  int64_t tile_banks;  // banks that compute; READRESs deliver no results of the others
  int64_t latches;     // latch l takes vectors of buffer l modulo `buffers`
  // Parts of the channels of a grouped convolution; `c` and `oc` are the channels of one part. Pixel p uses part
  // p / pixels().
  int64_t parts;
  int64_t table_row;  // row of the table of the activation function, which identifies it; -1 for none

  int64_t pixels() const { return n * oh * ow; }
  int64_t all_c() const { return c * parts; }
  int64_t all_oc() const { return oc * parts; }
  /*! \brief Index of an output channel of a pixel among all outputs. */
  int64_t output(int64_t pixel, int64_t channel) const {
    return pixel % pixels() * all_oc() + pixel / pixels() * oc + channel;
  }
  int64_t row_elements() const { return columns * elements_per_column; }
  int64_t lanes() const { return (banks + kLanes - 1) / kLanes * kLanes; }
};

/*! \brief The word of a result that no READRES delivers: NaN, or the smallest integer. */
inline int32_t UnreadWord(Storage storage) {
  return storage == Storage::kInt8 ? std::numeric_limits<int32_t>::min() : 0x7fc00000;
}

/*! \brief An uninitialised array of operands (4-byte words), aligned so that no vector crosses a cache line. */
class Operands {
 public:
  explicit Operands(int64_t count)
      : count_(count), words_(static_cast<char*>(::operator new(count * 4, std::align_val_t(64)))) {}
  void Clear() { std::memset(words_.get(), 0, count_ * 4); }
  char* at(int64_t index) const { return words_.get() + index * 4; }

 private:
  struct Free {
    void operator()(char* words) const { ::operator delete(words, std::align_val_t(64)); }
  };
  const int64_t count_;
  std::unique_ptr<char, Free> words_;
};

/*! \brief Elements of im2col vectors, in (kh, kw, c) order, of an input of operands. */
class Im2col {
 public:
  Im2col(const Header& header, const char* input)
      : h_(header),
        input_(input),
        // Taps that are contiguous in the input: a row of the kernel, unless it is dilated.
        taps_(header.dilation_w == 1 && header.parts == 1 ? header.kw : 1),
        runs_(header.kw / taps_),
        run_elements_(taps_ * header.c) {}

  /*! \brief Copy elements [k, k + count) of the vectors of `pixels` pixels from `pixel` on to `out`. */
  void Gather(int64_t pixel, int64_t pixels, int64_t k, int64_t count, char* out) const {
    int64_t ow = pixel % h_.ow, oh = pixel / h_.ow % h_.oh, n = pixel / (h_.ow * h_.oh) % h_.n;
    const char* part = input_ + pixel / h_.pixels() * h_.c * 4;
    const int64_t end = std::min(k + count, h_.kh * h_.kw * h_.c);
    for (; pixels > 0; --pixels) {
      char* to = out;
      for (int64_t from = k; from < end;) {
        const int64_t run = from / run_elements_, first = from - run * run_elements_;
        const int64_t length = std::min(run_elements_ - first, end - from);
        Run(part, n, oh, ow, run, first, length, to);
        from += length;
        to += length * 4;
      }
      out += count * 4;
      std::memset(to, 0, out - to);
      if (++ow == h_.ow) {
        ow = 0;
        if (++oh == h_.oh) oh = 0, ++n;
      }
    }
  }

 private:
  /*! \brief Copy elements [first, first + length) of a run of taps; zeros in the padding. */
  void Run(const char* part, int64_t n, int64_t oh, int64_t ow, int64_t run, int64_t first, int64_t length,
           char* to) const {
    const int64_t ky = run / runs_, kx = run % runs_ * h_.dilation_w;
    const int64_t y = oh * h_.stride_h - h_.pad_top + ky * h_.dilation_h;
    const int64_t x = ow * h_.stride_w - h_.pad_left + kx;
    int64_t begin = first, stop = first + length;  // the part inside the input
    if (y < 0 || y >= h_.h) {
      stop = begin;
    } else if (x < 0 || x + taps_ > h_.w) {
      begin = std::clamp(-x * h_.c, first, stop);
      stop = std::clamp((h_.w - x) * h_.c, begin, stop);
    }
    std::memset(to, 0, (begin - first) * 4);
    std::memcpy(to + (begin - first) * 4, part + (((n * h_.h + y) * h_.w + x) * h_.all_c() + begin) * 4,
                (stop - begin) * 4);
    std::memset(to + (stop - first) * 4, 0, (first + length - stop) * 4);
  }

  const Header& h_;
  const char* input_;
  const int64_t taps_, runs_, run_elements_;
};

/*! \brief Store an operand, which must be a value of the storage type. */
inline void StoreOperand(Storage storage, const char* operand, char* to) {
  uint32_t bits;
  std::memcpy(&bits, operand, 4);
  if (storage == Storage::kFloat16) {
    const uint16_t half = HalfBits(bits);
    std::memcpy(to, &half, 2);
  } else if (storage == Storage::kBFloat16) {
    const auto upper = static_cast<uint16_t>(bits >> 16);
    std::memcpy(to, &upper, 2);
  } else if (storage == Storage::kInt8) {
    *to = static_cast<char>(bits);
  } else {
    std::memcpy(to, &bits, 4);
  }
}

/*! \brief The open rows of one channel's banks as operands, with one lane for each bank. */
class OpenRows {
 public:
  OpenRows(const Header& header, const LaneKernels& kernels, char* pages)
      : h_(header),
        storage_(static_cast<Storage>(header.storage)),
        kernels_(kernels),
        pages_(pages),
        pages_of_gangs_(header.gangs),
        ready_(header.columns),
        operands_(header.row_elements() * header.lanes()) {
    operands_.Clear();  // the lanes beyond the banks stay zero
  }

  /*! \brief Close all rows; rows opened later hold the pages of `table`. */
  void Close(const int32_t* table) {
    table_ = table;
    std::fill(pages_of_gangs_.begin(), pages_of_gangs_.end(), kClosed);
    changed_ = true;
  }

  void Open(int64_t gang, int64_t row) {
    const int64_t table_row_index = row - h_.row_begin;
    const int32_t page =
        table_row_index >= 0 && table_row_index < h_.rows ? std::max(table_[table_row_index], kEmpty) : kEmpty;
    if (page == pages_of_gangs_[gang]) return;
    pages_of_gangs_[gang] = page;
    changed_ = true;
  }

  /*! \brief Store the operands of a WRITE (banks x columns x elements) in the open row of its gang. */
  void Store(const WriteOperands& w, const char* operands) {
    const int32_t page = pages_of_gangs_[w.gang];
    if (page < 0) return;  // cannot happen: Python rejects images that lack a row
    const int64_t bytes = StorageBytes(storage_), first_bank = h_.banks / h_.gangs * w.gang + w.bank;
    for (int64_t bank = 0; bank < w.banks; ++bank) {
      for (int64_t column = w.column; column < w.column + w.count; ++column) {
        const int64_t element = column * h_.elements_per_column + w.element;
        for (int64_t e = element; e < element + w.elements; ++e, operands += 4) {
          char* to = pages_ + ((page * h_.row_elements() + e) * h_.banks + first_bank + bank) * bytes;
          StoreOperand(storage_, operands, to);
        }
      }
    }
    std::fill_n(ready_.begin() + w.column, w.count, 0);
  }

  bool HasClosedGang() const { return std::count(pages_of_gangs_.begin(), pages_of_gangs_.end(), kClosed) > 0; }
  bool IsClosed(int64_t gang) const { return pages_of_gangs_[gang] == kClosed; }

  /*! \brief Weights [column][element][lane] from `column` on; zero in banks without weights. */
  const char* Columns(int64_t column, int64_t count) {
    if (changed_) {
      std::fill(ready_.begin(), ready_.end(), 0);
      changed_ = false;
      shares_page_ = std::all_of(pages_of_gangs_.begin(), pages_of_gangs_.end(),
                                 [&](int32_t page) { return page == pages_of_gangs_[0]; });
    }
    const int64_t end = column + count;
    for (int64_t c = column; c < end; ++c) {
      if (ready_[c]) continue;
      const int64_t first = c;
      for (; c < end && !ready_[c]; ++c) ready_[c] = 1;
      Widen(first * h_.elements_per_column, (c - first) * h_.elements_per_column);
    }
    return operands_.at(column * h_.elements_per_column * h_.lanes());
  }

 private:
  static constexpr int32_t kClosed = -2, kEmpty = -1;

  void Widen(int64_t first, int64_t count) {
    const int64_t bytes = StorageBytes(storage_), lanes = h_.lanes();
    const bool whole = shares_page_ && h_.banks == lanes;
    const int64_t parts = shares_page_ ? 1 : h_.gangs, banks = h_.banks / parts;
    for (int64_t part = 0; part < parts; ++part) {
      const int32_t page = pages_of_gangs_[part];
      for (int64_t e = first; e < first + count; e += whole ? count : 1) {
        char* to = operands_.at(e * lanes + part * banks);
        const int64_t words = whole ? count * lanes : banks;
        if (page < 0) {
          std::memset(to, 0, words * 4);
        } else {
          const int64_t from = (page * h_.row_elements() + e) * h_.banks + part * banks;
          kernels_.widen(storage_, pages_ + from * bytes, words, to);
        }
      }
    }
  }

  const Header& h_;
  const Storage storage_;
  const LaneKernels& kernels_;
  char* pages_;
  const int32_t* table_ = nullptr;
  std::vector<int32_t> pages_of_gangs_;
  std::vector<uint8_t> ready_;  // columns that `operands_` holds
  Operands operands_;
  bool changed_ = true, shares_page_ = false;
};

/*! \brief `value`, clamped to [0, high]; NaN stays NaN. */
template <typename T>
T Rectified(T value, T high) {
  return value < 0 ? 0 : value > high ? high : value;
}

/*! \brief Apply a rectifier to words: fp32, or int32 for int8. Tables are in the order of ACTIVATIONS in Python. */
void Rectify(Storage storage, bool bounded, char* words, int64_t count) {
  for (char* end = words + count * 4; words < end; words += 4) {
    if (storage == Storage::kInt8) {
      int32_t value;
      std::memcpy(&value, words, 4);
      value = Rectified<int32_t>(value, bounded ? 6 : std::numeric_limits<int32_t>::max());
      std::memcpy(words, &value, 4);
    } else {
      float value;
      std::memcpy(&value, words, 4);
      value = Rectified(value, bounded ? 6.0f : std::numeric_limits<float>::infinity());
      std::memcpy(words, &value, 4);
    }
  }
}

/*! \brief A channel: banks, global buffers and result latches. One object executes channels one after the other. */
class Channel {
 public:
  /*! \param initial Values that WRBIAS writes: [pixels, oc] if `initial_per_pixel`, else [oc] for all pixels. */
  Channel(const Header& header, const LaneKernels& kernels, char* pages, const char* input, const char* initial,
          bool initial_per_pixel, char* output)
      : h_(header),
        storage_(static_cast<Storage>(header.storage)),
        kernels_(kernels),
        initial_(initial),
        initial_per_pixel_(initial_per_pixel),
        output_(output),
        buffer_elements_(header.buffer_columns * header.elements_per_column),
        lanes_(header.lanes()),
        im2col_(header, input),
        rows_(header, kernels, pages),
        buffers_(header.buffers * buffer_elements_),
        latches_(header.latches * lanes_),
        saved_latch_(lanes_),
        rounded_(lanes_),
        row_of_gangs_(header.gangs, -1),
        tree_(header.elements_per_column * kLanes) {}

  /*! \brief Become a channel whose rows hold the pages of `table`, with all rows closed. */
  void Reset(const int32_t* table) {
    rows_.Close(table);
    buffers_.Clear();
    latches_.Clear();
    std::fill(row_of_gangs_.begin(), row_of_gangs_.end(), -1);
    has_closed_gang_ = true;
  }

  void Gwrite(int64_t buffer, int64_t pixel, int64_t pixels, int64_t k, int64_t columns) {
    im2col_.Gather(pixel, pixels, k, columns * h_.elements_per_column, buffers_.at(buffer * buffer_elements_));
  }

  void Write(const WriteOperands& write) {
    const int64_t count = write.banks * write.count * write.elements;
    if (static_cast<int64_t>(written_.size()) < count * 4) written_.resize(count * 4);
    im2col_.Gather(write.pixel, 1, write.k, count, written_.data());
    rows_.Store(write, written_.data());
  }

  void GAct(int64_t gang, int64_t row) {
    rows_.Open(gang, row);
    row_of_gangs_[gang] = row;
    if (has_closed_gang_) has_closed_gang_ = rows_.HasClosedGang();
  }

  void Comp(int64_t index, int64_t /*row: whatever is open*/, int64_t column, int64_t count) {
    const int64_t elements = h_.elements_per_column;
    char* latch = latches_.at(index * lanes_);
    const char* vector = buffers_.at(index % h_.buffers * buffer_elements_ + column % h_.buffer_columns * elements);
    if (has_closed_gang_) std::memcpy(saved_latch_.at(0), latch, lanes_ * 4);
    kernels_.comp(storage_ == Storage::kInt8, rows_.Columns(column, count), vector, count, elements, lanes_,
                  latch, tree_.at(0));
    if (!has_closed_gang_) return;
    const int64_t banks = h_.banks / h_.gangs;
    for (int64_t gang = 0; gang < h_.gangs; ++gang) {
      if (rows_.IsClosed(gang)) std::memcpy(latch + gang * banks * 4, saved_latch_.at(gang * banks), banks * 4);
    }
  }

  void Readres(int64_t index, int64_t pixel, int64_t channel) {
    char* latch = latches_.at(index * lanes_);
    char* out = Result(pixel, channel);
    const int64_t valid = std::min(h_.tile_banks, h_.oc - channel);
    if (valid == lanes_) {
      kernels_.narrow(storage_, latch, lanes_, out);
    } else {
      kernels_.narrow(storage_, latch, lanes_, rounded_.at(0));
      std::memcpy(out, rounded_.at(0), valid * 4);
    }
    for (int64_t lane = 0; lane < lanes_; lane += kLanes) std::memset(latch + lane * 4, 0, kLanes * 4);
  }

  void Wrbias(int64_t index, int64_t pixel, int64_t channel, bool resumed) {
    const int64_t valid = std::min(h_.tile_banks, h_.oc - channel);
    char* latch = latches_.at(index * lanes_);
    std::memset(latch, 0, lanes_ * 4);
    const int64_t part_start = pixel / h_.pixels() * h_.oc + channel;
    const int64_t start = initial_per_pixel_ ? h_.output(pixel, channel) : part_start;
    std::memcpy(latch, resumed ? Result(pixel, channel) : initial_ + start * 4, valid * 4);
  }

  /*! \brief Apply the activation function; banks whose row of the table is not open get no result. */
  void Af(int64_t index, int64_t /*row: whatever is open*/) {
    char* latch = latches_.at(index * lanes_);
    kernels_.narrow(storage_, latch, lanes_, rounded_.at(0));
    Rectify(storage_, h_.table_row > 0, rounded_.at(0), lanes_);
    const int32_t unread_word = UnreadWord(storage_);
    const int64_t banks = h_.banks / h_.gangs;
    for (int64_t bank = 0; bank < h_.banks; ++bank) {
      const bool open = row_of_gangs_[bank / banks] == h_.table_row;
      std::memcpy(latch + bank * 4, open ? rounded_.at(bank) : reinterpret_cast<const char*>(&unread_word), 4);
    }
  }

 private:
  /*! \brief Address of an output. */
  char* Result(int64_t pixel, int64_t channel) const {
    return output_ + (h_.output(pixel, channel) - h_.pixel_begin * h_.all_oc()) * 4;
  }

  const Header& h_;
  const Storage storage_;
  const LaneKernels& kernels_;
  const char* initial_;
  const bool initial_per_pixel_;
  char* output_;
  const int64_t buffer_elements_, lanes_;
  const Im2col im2col_;
  OpenRows rows_;
  Operands buffers_, latches_, saved_latch_, rounded_;
  std::vector<int64_t> row_of_gangs_;
  Operands tree_;
  std::vector<char> written_;  // operands of one WRITE
  bool has_closed_gang_ = true;
};

/*! \brief Sets rounding to nearest with subnormals, which the calling thread may have changed, and restores it. */
class DefaultArithmetic {
 public:
  DefaultArithmetic() {
    std::fegetenv(&saved_);
    std::fesetenv(FE_DFL_ENV);
  }
  ~DefaultArithmetic() { std::fesetenv(&saved_); }
  DefaultArithmetic(const DefaultArithmetic&) = delete;

 private:
  std::fenv_t saved_;
};

template <typename T>
T* Data(const ffi::TensorView& tensor) {
  return reinterpret_cast<T*>(static_cast<char*>(tensor.data_ptr()) + tensor.byte_offset());
}

/*! \brief Whether encoded streams have a WRBIAS that sets latches to initial values. */
bool SetsLatches(const int64_t* words, int64_t size) {
  for (int64_t at = 0; at < size; at += words[at] == kLoop ? 3 : words[at + 1]) {
    if (words[at] == kWrbias && !words[at + kResumedWord]) return true;
  }
  return false;
}

/*!
 * \brief Execute all channels of a program.
 * \param header Words of Header.
 * \param words All channels' encoded streams, concatenated.
 * \param offsets [channels + 1] where each begins.
 * \param pages [pages, elements per row, banks] of the storage type; WRITEs change them.
 * \param table [channels, rows] int32: page of each row, -1 for none.
 * \param input [n, h, w, c] fp32, which is rounded to the storage type; int32 for int8.
 * \param initial Values that a WRBIAS writes: [oc] for every pixel, or [n*oh*ow, oc]; same type and rounding as
 *   the input. Empty if the program has none.
 * \param output [pixel_end - pixel_begin, oc] fp32, or int32 for int8; NaN or the smallest integer where no
 *   READRES delivers a result.
 * \param threads Channels executed at a time; values do not depend on it.
 * \param variant Instruction set, see FindLaneVariant; values do not depend on it.
 */
void Execute(ffi::TensorView header, ffi::TensorView words, ffi::TensorView offsets,
             ffi::TensorView pages, ffi::TensorView table, ffi::TensorView input,
             ffi::TensorView initial, ffi::TensorView output, int64_t threads, ffi::String variant) {
  TVM_FFI_ICHECK_EQ(header.numel() * sizeof(int64_t), sizeof(Header)) << "bad program header";
  Header h;
  std::memcpy(&h, header.data_ptr(), sizeof(Header));
  const auto storage = static_cast<Storage>(h.storage);
  const auto element_bytes = static_cast<int64_t>(pages.dtype().bits) / 8;
  TVM_FFI_ICHECK_EQ(element_bytes, StorageBytes(storage)) << "pages are not of the program's type";
  const int code = storage == Storage::kInt8 ? kDLInt : kDLFloat;
  for (const ffi::TensorView& tensor : {input, initial, output}) {
    TVM_FFI_ICHECK(tensor.dtype().code == code && tensor.dtype().bits == 32)
        << "input and output are fp32, or int32 where the program is of int8";
  }
  TVM_FFI_ICHECK_EQ(input.numel(), h.n * h.h * h.w * h.all_c()) << "input tensor does not fit the program";
  const bool initial_per_pixel = initial.numel() == h.pixels() * h.all_oc();
  TVM_FFI_ICHECK(initial_per_pixel || initial.numel() == h.all_oc() || initial.numel() == 0)
      << "what the latches start from does not fit the program";
  TVM_FFI_ICHECK(initial.numel() > 0 || !SetsLatches(Data<const int64_t>(words), words.numel()))
      << "the program sets latches, and nothing says to what";
  TVM_FFI_ICHECK_EQ(output.numel(), (h.pixel_end - h.pixel_begin) * h.all_oc())
      << "output tensor does not fit the program";
  const LaneKernels& kernels = FindLaneVariant(variant);
  const int64_t channels = offsets.numel() - 1;
  threads = std::clamp<int64_t>(threads, 1, channels);

  const char* input_data = Data<const char>(input);
  auto* out = Data<int32_t>(output);
  const bool rounds = storage == Storage::kFloat16 || storage == Storage::kBFloat16;
  const int64_t rounded_count = rounds ? input.numel() : 0, initial_count = rounds ? initial.numel() : 0;
  const Operands rounded(rounded_count), rounded_initial(initial_count);
  {
    const DefaultArithmetic arithmetic;
    kernels.narrow(storage, Data<const char>(initial), initial_count, rounded_initial.at(0));
  }
  const int32_t unread_word = UnreadWord(storage);
  // All threads prepare slabs of both tensors; they begin with the channels when all slabs are ready.
  constexpr int64_t kSlab = 1 << 14;
  const int64_t slabs = (std::max(rounded_count, output.numel()) + kSlab - 1) / kSlab;
  auto prepare = [&](int64_t slab) {
    const int64_t begin = slab * kSlab, end = begin + kSlab;
    if (begin < rounded_count) {
      kernels.narrow(storage, input_data + begin * 4, std::min(kSlab, rounded_count - begin), rounded.at(begin));
    }
    if (begin < output.numel()) std::fill(out + begin, out + std::min(end, output.numel()), unread_word);
  };

  const auto* stream = static_cast<const int64_t*>(words.data_ptr());
  const auto* begin = static_cast<const int64_t*>(offsets.data_ptr());
  const auto* rows = static_cast<const int32_t*>(table.data_ptr());
  std::vector<std::unique_ptr<Channel>> devices;
  for (int64_t t = 0; t < threads; ++t) {
    devices.push_back(std::make_unique<Channel>(h, kernels, Data<char>(pages),
                                                rounded_count ? rounded.at(0) : input_data,
                                                initial_count ? rounded_initial.at(0) : Data<const char>(initial),
                                                initial_per_pixel, reinterpret_cast<char*>(out)));
  }
  std::atomic<int64_t> next_slab{0}, prepared_slabs{0}, next_channel{0};
  auto work = [&](int64_t thread) {
    const DefaultArithmetic arithmetic;
    Channel* device = devices[thread].get();
    for (int64_t i = next_slab++; i < slabs; i = next_slab++, ++prepared_slabs) prepare(i);
    WaitUntil([&] { return prepared_slabs == slabs; });
    for (int64_t i = next_channel++; i < channels; i = next_channel++) {
      device->Reset(rows + i * h.rows);
      Walk(stream + begin[i], begin[i + 1] - begin[i], device);
    }
  };
  Workers::Run(threads, work);
}

ffi::Array<ffi::String> Variants() {
  ffi::Array<ffi::String> names;
  for (const LaneKernels& variant : LaneVariants()) names.push_back(variant.name);
  return names;
}

TVM_FFI_STATIC_INIT_BLOCK() {
  namespace refl = tvm::ffi::reflection;
  refl::GlobalDef()
      .def("pimflow.simulators.execute", Execute)
      .def("pimflow.simulators.simd_variants", Variants);
}

}  // namespace
}  // namespace pimflow
