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
 * The buffer of a COMP, READRES, WRBIAS or AF is a latch; where a buffer has several, latch l is one of buffer
 * l modulo the number of buffers.
 */
#ifndef PIMFLOW_SIMULATORS_PROGRAM_H_
#define PIMFLOW_SIMULATORS_PROGRAM_H_

#include <cstdint>

namespace pimflow {

constexpr int kMaxDepth = 4;
constexpr int kAffineWords = 1 + kMaxDepth;
constexpr int kResumedWord = 3 + 2 * kAffineWords;  // of a WRBIAS, from its opcode on

enum Opcode : int64_t {
  kLoop = 0,
  kGwrite = 1,
  kGAct = 2,
  kComp = 3,
  kReadres = 4,
  kStore = 5,
  kWrbias = 6,
  kActivate = 7
};

inline int64_t At(const int64_t* affine, const int64_t* counters) {
  int64_t value = affine[0];
  for (int d = 0; d < kMaxDepth; ++d) value += affine[1 + d] * counters[d];
  return value;
}

/*! \brief Operands of a WRITE; see `Write` in Python. */
struct Stored {
  int64_t gang, bank, banks, row, column, count, element, elements, pixel, k;
};

inline Stored StoredAt(const int64_t* node, const int64_t* counters) {
  const int64_t* arg = node + 2;
  const int64_t* more = arg + 3 + 2 * kAffineWords;
  return Stored{arg[0],  arg[1],  arg[2],  At(arg + 3, counters),  At(arg + 3 + kAffineWords, counters),
                more[0], more[1], more[2], At(more + 3, counters), At(more + 3 + kAffineWords, counters)};
}

/*!
 * \brief Call the visitor for a node that is no loop.
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
      visit->Gwrite(arg[0], At(arg + 1, counters), arg[1 + kAffineWords],
                    At(arg + 2 + kAffineWords, counters), arg[2 + 2 * kAffineWords]);
      break;
    case kGAct:
      visit->GAct(arg[0], At(arg + 1, counters));
      break;
    case kComp:
      visit->Comp(arg[0], At(arg + 1, counters), At(arg + 1 + kAffineWords, counters),
                  arg[1 + 2 * kAffineWords]);
      break;
    case kStore:
      visit->Write(StoredAt(node, counters));
      break;
    case kWrbias:
      visit->Wrbias(arg[0], At(arg + 1, counters), At(arg + 1 + kAffineWords, counters),
                    arg[kResumedWord - 2] != 0);
      break;
    case kActivate:
      visit->Af(arg[0], At(arg + 1, counters));
      break;
    default:
      visit->Readres(arg[0], At(arg + 1, counters), At(arg + 1 + kAffineWords, counters));
  }
}

/*! \brief Visit every command, in order, loops run. */
template <typename Visitor>
void Walk(const int64_t* words, const int64_t* end, int64_t* counters, int depth, Visitor* visit) {
  if (depth > kMaxDepth) return;  // never encoded; without it GCC warns of a counter too many
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
