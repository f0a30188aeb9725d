/*!
 * \brief Clears in command streams what has no effect on time: pixels, elements, outputs, banks, the first row.
 */
#include <tvm/ffi/container/tensor.h>
#include <tvm/ffi/reflection/registry.h>
#include <tvm/ffi/tvm_ffi.h>

#include <algorithm>
#include <limits>
#include <vector>

#include "timing.h"

namespace pimflow {
namespace {

namespace ffi = tvm::ffi;

class Signature {
 public:
  /*! \brief Clear the words of nodes; `extents` are of the `depth` loops around them. */
  void Clear(int64_t* node, const int64_t* end, int64_t* extents, int depth) {
    while (node < end) {
      const int64_t opcode = node[0], size = node[1];
      int64_t* arg = node + 2;
      if (opcode == kLoop) {
        if (depth >= kMaxDepth) return;  // cannot happen, since `Stream` throws; without it GCC warns
        extents[depth] = node[2];
        Clear(node + 3, node + size, extents, depth + 1);
      } else if (opcode == kGwrite) {
        std::fill_n(arg + 1, kAffineWords, 0);
        std::fill_n(arg + 2 + kAffineWords, kAffineWords, 0);
      } else if (opcode == kReadres || opcode == kWrbias) {
        std::fill_n(arg + 1, 2 * kAffineWords, 0);
      } else {
        if (opcode == kWriteNode) {
          arg[1] = 0;
          arg[4 + 2 * kAffineWords] = 0;
          std::fill_n(arg + 6 + 2 * kAffineWords, 2 * kAffineWords, 0);
        }
        AddRow(arg + (opcode == kWriteNode ? 3 : 1), extents, depth);
      }
      node += size;
    }
  }

  /*! \brief Shift rows so that the smallest one that a command names is 0. */
  void MoveRows() const {
    for (int64_t* row : rows_) *row -= min_row_;
  }

 private:
  void AddRow(int64_t* row, const int64_t* extents, int depth) {
    int64_t min_row = row[0];
    for (int d = 0; d < depth; ++d) min_row += std::min<int64_t>(row[1 + d], 0) * (extents[d] - 1);
    min_row_ = std::min(min_row_, min_row);
    rows_.push_back(row);
  }

  std::vector<int64_t*> rows_;
  int64_t min_row_ = std::numeric_limits<int64_t>::max();
};

/*!
 * \brief Clear in place what has no effect on the time of an encoded stream.
 * \param keep_rows Leave rows as they are.
 */
void TimingSignature(ffi::TensorView words, bool keep_rows) {
  auto* begin = const_cast<int64_t*>(Stream(words));
  int64_t extents[kMaxDepth] = {};
  Signature signature;
  signature.Clear(begin, begin + words.numel(), extents, 0);
  if (!keep_rows) signature.MoveRows();
}

TVM_FFI_STATIC_INIT_BLOCK() {
  tvm::ffi::reflection::GlobalDef().def("pimflow.simulators.timing_signature", TimingSignature);
}

}  // namespace
}  // namespace pimflow
