/*!
 * \brief Arithmetic of the DRAM-PIM executor in several instruction sets, with one lane for each bank.
 *
 * All variants compute the same bits: lanes are banks, so the width of a vector does not change the order of a
 * sum, and no product is contracted into an FMA (setup.py disables that).
 */
#ifndef PIMFLOW_SIMULATORS_LANES_H_
#define PIMFLOW_SIMULATORS_LANES_H_

#include <cstdint>
#include <string>
#include <vector>

namespace pimflow {

/*! \brief Storage types, with their codes in a program's header. */
enum class Storage : int64_t { kFloat32 = 0, kFloat16 = 1, kBFloat16 = 2, kInt8 = 3 };

inline int64_t StorageBytes(Storage storage) {
  return storage == Storage::kFloat32 ? 4 : storage == Storage::kInt8 ? 1 : 2;
}

/*! \brief Lanes are padded to a multiple of this, which is the width of the widest vector. */
constexpr int64_t kLanes = 16;

/*!
 * \brief The kernels of one instruction set. Operands are 4-byte words: fp32, or int32 if `integer`.
 *
 * `widen` converts `count` stored values to operands, exactly. `narrow` rounds `count` operands to the nearest
 * value of the storage type, ties to even; the results are operands. Every NaN becomes 0x7fc00000, because the
 * NaN that a sum of two NaNs returns depends on the instruction. int8 results are not changed.
 *
 * `comp` is a run of COMPs: latch[b] += tree(weights[column][e][b] * vector[column][e]) for every column, in
 * order. The tree adds the pairs (2i, 2i+1), then the pairs of their sums, and passes on an odd last element.
 * `lanes` is a multiple of kLanes, `tree` has space for elements * kLanes words.
 */
struct LaneKernels {
  const char* name;
  void (*widen)(Storage storage, const void* from, int64_t count, void* to);
  void (*narrow)(Storage storage, const void* from, int64_t count, void* to);
  void (*comp)(bool integer, const void* weights, const void* vector, int64_t columns, int64_t elements,
               int64_t lanes, void* latch, void* tree);
};

/*! \brief Variants that this processor can run, the fastest first; the last is "portable". */
const std::vector<LaneKernels>& LaneVariants();

/*! \brief The variant called `name`; if it is empty, that of the variable PIMFLOW_SIMD, or the fastest. */
const LaneKernels& FindLaneVariant(const std::string& name);

}  // namespace pimflow

#endif  // PIMFLOW_SIMULATORS_LANES_H_
