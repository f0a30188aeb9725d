/*!
 * \brief Walk over the encoded command stream of one channel (see PimProgram.encoded in Python).
 *
 * A node is `opcode, size in words, operands`; an affine is a base and kMaxDepth coefficients over
 * the counters of the enclosing loops, outermost first.
 *
 *   0 LOOP     extent, body nodes
 *   1 GWRITE   buffer, pixel (affine), pixels, k (affine), columns
 *   2 G_ACT    gang, row (affine)
 *   3 COMP     buffer, row (affine), column (affine), count
 *   4 READRES  buffer, pixel (affine), channel (affine)
 *   5 WRITE    gang, bank, banks, row (affine), column (affine), count, element, elements, pixel (affine),
 *              k (affine)
 *   6 WRBIAS   buffer, pixel (affine), channel (affine), resumed
 *   7 AF       buffer, row (affine)
 *
 * The `buffer` of a COMP, READRES, WRBIAS or AF is a latch; latch l belongs to buffer l modulo the number of
 * buffers.
 */
#ifndef PIMFLOW_SIMULATORS_PROGRAM_H_
#define PIMFLOW_SIMULATORS_PROGRAM_H_

#include <tvm/ffi/error.h>

#include <cstdint>

namespace pimflow {

constexpr int kMaxDepth = 4;
constexpr int kAffineWords = 1 + kMaxDepth;
constexpr int kResumedWord = 3 + 2 * kAffineWords;  // index of `resumed` in a WRBIAS, from its opcode on

enum Opcode : int64_t {
  kLoop = 0,
  kGwrite = 1,
  kGAct = 2,
  kComp = 3,
  kReadres = 4,
  kWriteNode = 5,
  kWrbias = 6,
  kAfNode = 7
};

inline int64_t Evaluate(const int64_t* affine, const int64_t* counters) {
  int64_t value = affine[0];
  for (int d = 0; d < kMaxDepth; ++d) value += affine[1 + d] * counters[d];
  return value;
}

/*! \brief Number of words of a node (of a LOOP without its body), and positions of its affines in it. */
struct NodeLayout {
  int64_t words;
  int64_t affines[4];  // 0 where there is none
};

constexpr NodeLayout kLayouts[] = {
    {3, {}},
    {5 + 2 * kAffineWords, {3, 4 + kAffineWords}},
    {3 + kAffineWords, {3}},
    {4 + 2 * kAffineWords, {3, 3 + kAffineWords}},
    {3 + 2 * kAffineWords, {3, 3 + kAffineWords}},
    {8 + 4 * kAffineWords, {5, 5 + kAffineWords, 8 + 2 * kAffineWords, 8 + 3 * kAffineWords}},
    {kResumedWord + 1, {3, 3 + kAffineWords}},
    {3 + kAffineWords, {3}},
};

/*! \brief Throw unless all values of an affine fit in 62 bits; `extents` are of the `depth` loops around it. */
inline void CheckAffine(const int64_t* affine, const int64_t* extents, int depth) {
  __int128 max_magnitude = affine[0] < 0 ? -static_cast<__int128>(affine[0]) : affine[0];
  for (int d = 0; d < depth; ++d) {
    const __int128 term = static_cast<__int128>(affine[1 + d]) * extents[d];
    max_magnitude += term < 0 ? -term : term;
  }
  if (max_magnitude >> 62 != 0) TVM_FFI_THROW(ValueError) << "0:a number is beyond 2^62";
}

/*! \brief Throw unless all operands of a node fit in 31 bits, and all values of its affines in 62. */
inline void CheckOperands(const int64_t* node, const NodeLayout& layout, const int64_t* extents, int depth) {
  constexpr int64_t kMaxOperand = int64_t{1} << 31;
  bool is_affine_word[8 + 4 * kAffineWords] = {};
  for (int64_t first : layout.affines) {
    if (first == 0) continue;
    CheckAffine(node + first, extents, depth);
    for (int64_t word = first; word < first + kAffineWords; ++word) is_affine_word[word] = true;
  }
  for (int64_t word = 2; word < layout.words; ++word) {
    if (!is_affine_word[word] && (node[word] < -kMaxOperand || node[word] >= kMaxOperand)) {
      TVM_FFI_THROW(ValueError) << "0:" << node[word] << " is no operand of a command";
    }
  }
}

inline void CheckNodes(const int64_t* node, const int64_t* end, int64_t* extents, int depth) {
  for (; node < end; node += node[1]) {
    const bool is_known = end - node > 1 && node[0] >= kLoop && node[0] <= kAfNode;
    const NodeLayout& layout = kLayouts[is_known ? node[0] : kLoop];
    if (!is_known || node[1] < layout.words || node[1] > end - node || (node[0] != kLoop && node[1] != layout.words)) {
      TVM_FFI_THROW(ValueError) << "0:not a stream of commands";
    }
    int64_t bits = 0;
    for (int64_t word = 2; word < layout.words; ++word) bits |= node[word] ^ (node[word] >> 63);
    // If all numbers have at most 24 bits, and loops 31, no value is too large.
    if (bits >> 24 != 0) CheckOperands(node, layout, extents, depth);
    if (node[0] == kComp && node[layout.words - 1] < 0) {
      TVM_FFI_THROW(ValueError) << "0:" << node[layout.words - 1] << " is no operand of a command";
    }
    if (node[0] == kLoop) {
      if (depth >= kMaxDepth) TVM_FFI_THROW(ValueError) << "0:loops are nested deeper than " << kMaxDepth;
      extents[depth] = node[2];
      CheckNodes(node + layout.words, node + node[1], extents, depth + 1);
    }
  }
}

/*! \brief Throw unless `size` words are valid nodes: known, complete, not too deep, with numbers in range. */
inline void CheckStream(const int64_t* words, int64_t size) {
  int64_t extents[kMaxDepth] = {};
  CheckNodes(words, words + size, extents, 0);
}

/*! \brief Operands of a WRITE; see `Write` in Python. */
struct WriteOperands {
  int64_t gang, bank, banks, row, column, count, element, elements, pixel, k;
};

inline WriteOperands DecodeWrite(const int64_t* node, const int64_t* counters) {
  const int64_t* arg = node + 2;
  const int64_t* tail = arg + 3 + 2 * kAffineWords;
  return WriteOperands{
      arg[0],  arg[1],  arg[2],  Evaluate(arg + 3, counters),  Evaluate(arg + 3 + kAffineWords, counters),
      tail[0], tail[1], tail[2], Evaluate(tail + 3, counters), Evaluate(tail + 3 + kAffineWords, counters)};
}

/*!
 * \brief Call the visitor for a node that is not a loop.
 *
 * Visitor: Gwrite(buffer, pixel, pixels, k, columns), GAct(gang, row),
 * Comp(buffer, row, column, count), Readres(buffer, pixel, channel), Write(stored),
 * Wrbias(buffer, pixel, channel, resumed), Af(buffer, row).
 */
template <typename Visitor>
void Visit(const int64_t* node, const int64_t* counters, Visitor* visit) {
  const int64_t* arg = node + 2;
  switch (node[0]) {
    case kGwrite:
      visit->Gwrite(arg[0], Evaluate(arg + 1, counters), arg[1 + kAffineWords],
                    Evaluate(arg + 2 + kAffineWords, counters), arg[2 + 2 * kAffineWords]);
      break;
    case kGAct:
      visit->GAct(arg[0], Evaluate(arg + 1, counters));
      break;
    case kComp:
      visit->Comp(arg[0], Evaluate(arg + 1, counters), Evaluate(arg + 1 + kAffineWords, counters),
                  arg[1 + 2 * kAffineWords]);
      break;
    case kWriteNode:
      visit->Write(DecodeWrite(node, counters));
      break;
    case kWrbias:
      visit->Wrbias(arg[0], Evaluate(arg + 1, counters), Evaluate(arg + 1 + kAffineWords, counters),
                    arg[kResumedWord - 2] != 0);
      break;
    case kAfNode:
      visit->Af(arg[0], Evaluate(arg + 1, counters));
      break;
    default:
      visit->Readres(arg[0], Evaluate(arg + 1, counters), Evaluate(arg + 1 + kAffineWords, counters));
  }
}

/*! \brief Visit every command in order of execution, with all iterations of loops. */
template <typename Visitor>
void Walk(const int64_t* words, const int64_t* end, int64_t* counters, int depth, Visitor* visit) {
  if (depth > kMaxDepth) return;  // cannot happen; without it GCC warns about an index out of bounds
  for (const int64_t* node = words; node < end; node += node[1]) {
    if (node[0] == kLoop) {
      for (counters[depth] = 0; counters[depth] < node[2]; ++counters[depth]) {
        Walk(node + 3, node + node[1], counters, depth + 1, visit);
      }
      counters[depth] = 0;
    } else {
      Visit(node, counters, visit);
    }
  }
}

template <typename Visitor>
void Walk(const int64_t* words, int64_t size, Visitor* visit) {
  int64_t counters[kMaxDepth + 1] = {};
  Walk(words, words + size, counters, 0, visit);
}

}  // namespace pimflow

#endif  // PIMFLOW_SIMULATORS_PROGRAM_H_
