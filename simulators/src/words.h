/*! \brief Builds encoded command streams from nodes, and tensors of their words. */
#ifndef PIMFLOW_SIMULATORS_WORDS_H_
#define PIMFLOW_SIMULATORS_WORDS_H_

#include <tvm/ffi/container/tensor.h>

#include <algorithm>
#include <cstdlib>
#include <vector>

#include "../../python/pimflow/host/src/records.h"
#include "program.h"

namespace pimflow {

namespace ffi = tvm::ffi;

using Numbers = std::vector<int64_t>;

/*! \brief Append affines that are constant in all loops. */
inline void PutAffine(Numbers* words, const Numbers& bases) {
  for (int64_t base : bases) {
    words->push_back(base);
    words->insert(words->end(), kMaxDepth, 0);
  }
}

/*! \brief Append a command whose operands are numbers and affines alternately, as in program.h. */
inline void PutNode(Numbers* words, Opcode opcode, const Numbers& fixed, const Numbers& affine,
                    const Numbers& more_fixed = {}, const Numbers& more_affine = {}, const Numbers& last = {}) {
  const size_t begin = words->size();
  words->insert(words->end(), {opcode, 0});
  words->insert(words->end(), fixed.begin(), fixed.end());
  PutAffine(words, affine);
  words->insert(words->end(), more_fixed.begin(), more_fixed.end());
  PutAffine(words, more_affine);
  words->insert(words->end(), last.begin(), last.end());
  (*words)[begin + 1] = static_cast<int64_t>(words->size() - begin);
}

struct WordAllocator {
  void AllocData(DLTensor* tensor) { tensor->data = std::malloc(std::max<int64_t>(tensor->shape[0], 1) * 8); }
  void FreeData(DLTensor* tensor) { std::free(tensor->data); }
};

inline ffi::Tensor WordTensor(const Numbers& words) {
  const auto size = static_cast<int64_t>(words.size());
  ffi::Tensor tensor = ffi::Tensor::FromNDAlloc(WordAllocator(), ffi::Shape({size}), DLDataType{kDLInt, 64, 1},
                                                DLDevice{kDLCPU, 0});
  std::copy(words.begin(), words.end(), static_cast<int64_t*>(tensor.data_ptr()));
  return tensor;
}

}  // namespace pimflow

#endif  // PIMFLOW_SIMULATORS_WORDS_H_
