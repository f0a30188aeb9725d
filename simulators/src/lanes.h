/*!
 * \brief Arithmetic of the DRAM-PIM executor: one lane a bank, in several instruction sets.
 *
 * Every variant computes the same bits: lanes are banks, so the width of a vector never changes the
 * order of a sum, and no product is contracted into an FMA (setup.py turns that off).
 */
#ifndef PIMFLOW_SIMULATORS_LANES_H_
#define PIMFLOW_SIMULATORS_LANES_H_

#include <cstdint>
#include <string>
#include <vector>

namespace pimflow {

/*! \brief Storage types, by the word that stands for them in a program's header. */
enum class Storage : int64_t { kFloat32 = 0, kFloat16 = 1, kBFloat16 = 2, kInt8 = 3 };

inline int64_t StorageBytes(Storage storage) {
  return storage == Storage::kFloat32 ? 4 : storage == Storage::kInt8 ? 1 : 2;
}

/*! \brief Lanes are padded to a multiple of this; no vector is wider. */
constexpr int64_t kLanes = 16;

/*!
 * \brief One instruction set. Operands are 4-byte words: fp32, or int32 where `integer`.
 *
 * `widen` makes operands of `count` stored values, exactly. `narrow` rounds `count` operands to the
 * nearest stored value, ties to even, kept as operands; every NaN becomes 0x7fc00000, because which
 * NaN a sum of two returns depends on the instruction. int8 results stay as they are.
 *
 * `comp` is a run of COMPs: latch[b] += tree(weights[column][e][b] * vector[column][e]) for every
 * column, in order. The tree adds the pairs (2i, 2i+1), then theirs, and passes an odd last one on.
 * `lanes` is a multiple of kLanes, `tree` scratch of elements * kLanes words.
 */
struct LaneKernels {
  const char* name;
  void (*widen)(Storage storage, const void* from, int64_t count, void* to);
  void (*narrow)(Storage storage, const void* from, int64_t count, void* to);
  void (*comp)(bool integer, const void* weights, const void* vector, int64_t columns, int64_t elements,
               int64_t lanes, void* latch, void* tree);
};

/*! \brief Variants that this processor runs, the fastest first; the last is "portable". */
const std::vector<LaneKernels>& LaneVariants();

/*! \brief The variant of that name; empty: what the environment's PIMFLOW_SIMD names, or the fastest. */
const LaneKernels& LaneVariant(const std::string& name);

}  // namespace pimflow

#endif  // PIMFLOW_SIMULATORS_LANES_H_
