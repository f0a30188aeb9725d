/*!
 * \brief Common parts of the timing engines: command ids, totals of a run, and the walk over a parsed `.pim` trace.
 *
 * A word of a parsed trace is `kind << 29 | address`; the address is, from its top bit, bank group
 * [2], bank [2], row [14], column [5], offset [6].
 */
#ifndef PIMFLOW_SIMULATORS_TIMING_H_
#define PIMFLOW_SIMULATORS_TIMING_H_

#include <tvm/ffi/extra/c_env_api.h>
#include <tvm/ffi/tvm_ffi.h>

#include <cstdint>
#include <type_traits>

#include "program.h"

namespace pimflow {

/*! \brief Ids in the order of pimflow.hardware.pim.COMMANDS. */
enum Command : int { kGWRITE, kG_ACT, kCOMP, kREADRES, kPRE, kREF, kWRITE, kWRBIAS, kAF, kNumCommands };

constexpr int kAddressBits = 29;
constexpr int kOffsetBits = 6;
constexpr int kColumnBits = 5;
constexpr int kRowBits = 14;
constexpr int kBankBits = 2;
constexpr int kRowShift = kOffsetBits + kColumnBits;
constexpr int kGangShift = kRowShift + kRowBits + kBankBits;

/*! \brief Kinds of a trace word; G_ACT0..G_ACT3 are kTraceGAct0 + gang. */
enum TraceKind : uint32_t { kTraceGwrite = 0, kTraceReadres = 1, kTraceComp = 2, kTraceGAct0 = 4 };

inline int64_t TraceRow(uint32_t word) { return word >> kRowShift & ((1u << kRowBits) - 1); }
inline int64_t TraceColumn(uint32_t word) { return word >> kOffsetBits & ((1u << kColumnBits) - 1); }

/*! \brief Elements of a contiguous tensor of at least `elements` numbers, with the bits of T, or 64 for a struct. */
template <typename T>
T* Data(const tvm::ffi::TensorView& tensor, int64_t elements = 0) {
  const int64_t bits = std::is_arithmetic_v<T> ? 8 * sizeof(T) : 64;
  if (tensor.dtype().bits != bits || tensor.dtype().lanes != 1 || !tensor.IsContiguous() ||
      tensor.device().device_type != kDLCPU || tensor.numel() < elements) {
    TVM_FFI_THROW(ValueError) << "0:not " << elements << " or more numbers of " << bits << " bits in one piece";
  }
  return reinterpret_cast<T*>(static_cast<char*>(tensor.data_ptr()) + tensor.byte_offset());
}

/*! \brief The words of an encoded stream; throws if it is not valid. */
inline const int64_t* Stream(const tvm::ffi::TensorView& stream) {
  const auto* words = Data<const int64_t>(stream);
  CheckStream(words, stream.numel());
  return words;
}

/*! \brief Throw an error at a command of the stream, as "<index>:<problem>"; Python adds the place. */
#define PIMFLOW_THROW_AT(index) TVM_FFI_THROW(ValueError) << (index) << ":"

/*! \brief Throws if an interrupt is pending. */
inline void CheckInterrupt() {
  if (TVMFFIEnvCheckSignals() != 0) throw tvm::ffi::EnvErrorAlreadySet();
}

/*! \brief Totals of a part of a stream. */
struct Totals {
  int64_t commands[kNumCommands] = {};
  int64_t gwrite_bursts = 0;
  int64_t write_bursts = 0;
  int64_t streamed = 0;  // commands of the stream, without those that the engine adds

  template <typename Function>
  static void ForEach(Totals* a, const Totals& b, Function function) {
    for (int c = 0; c < kNumCommands; ++c) function(&a->commands[c], b.commands[c]);
    function(&a->gwrite_bursts, b.gwrite_bursts);
    function(&a->write_bursts, b.write_bursts);
    function(&a->streamed, b.streamed);
  }

  Totals Since(const Totals& earlier) const {
    Totals increase = *this;
    ForEach(&increase, earlier, [](int64_t* a, int64_t b) { *a -= b; });
    return increase;
  }

  /*! \brief Add `increase` so many times; returns false on overflow of 63 bits. */
  bool Add(const Totals& increase, int64_t times) {
    bool fits = true;
    ForEach(this, increase, [&](int64_t* a, int64_t b) {
      int64_t product;
      fits = fits && !__builtin_mul_overflow(b, times, &product) && !__builtin_add_overflow(*a, product, a);
    });
    return fits;
  }
};

/*!
 * \brief Visit a parsed trace as Walk visits a program: one buffer, GWRITE of `gwrite_columns`.
 *
 * COMPs of consecutive columns of a row are visited as one run.
 */
template <typename Visitor>
void WalkTrace(const uint32_t* word, int64_t size, int64_t gwrite_columns, Visitor* visit) {
  constexpr uint32_t kColumnStep = 1u << kOffsetBits;
  constexpr uint32_t kLastColumn = (1u << kColumnBits) - 1;
  for (const uint32_t* end = word + size; word < end;) {
    const uint32_t first = *word;
    const uint32_t kind = first >> kAddressBits;
    if (kind == kTraceComp) {
      const uint32_t* begin = word;
      uint32_t previous = first;
      for (++word; word < end && *word == previous + kColumnStep && TraceColumn(previous) < kLastColumn;) {
        previous = *word++;
      }
      visit->Comp(0, TraceRow(first), TraceColumn(first), word - begin);
      continue;
    }
    ++word;
    if (kind == kTraceGwrite) {
      visit->Gwrite(0, 0, 1, 0, gwrite_columns);
    } else if (kind == kTraceReadres) {
      visit->Readres(0, 0, 0);
    } else {
      visit->GAct(kind - kTraceGAct0, TraceRow(first));
    }
  }
}

}  // namespace pimflow

#endif  // PIMFLOW_SIMULATORS_TIMING_H_
