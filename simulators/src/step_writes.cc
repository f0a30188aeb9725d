/*!
 * \brief Selects the WRITEs of one step's tokens from a program that writes every place of a cache.
 *
 * Pixel t * matrices + m of the program is token t of matrix m; matrices are ordered by request. A step writes one
 * token of each matrix, at the position of its request; in the program of the step, pixel m belongs to matrix m.
 * Each row that is written is opened once in a gang.
 */
#include <tvm/ffi/container/array.h>
#include <tvm/ffi/container/tensor.h>
#include <tvm/ffi/reflection/registry.h>
#include <tvm/ffi/tvm_ffi.h>

#include <algorithm>
#include <cstring>
#include <tuple>
#include <vector>

#include "program.h"
#include "words.h"

namespace pimflow {
namespace {

/*! \brief Collects the WRITEs at the positions of a step. */
class StepWrites {
 public:
  StepWrites(const int64_t* positions, int64_t requests, int64_t matrices)
      : positions_(positions),
        per_request_(matrices / requests),
        matrices_(matrices),
        first_(*std::min_element(positions, positions + requests) * matrices),
        end_((*std::max_element(positions, positions + requests) + 1) * matrices) {}

  void Collect(const int64_t* words, int64_t size) {
    int64_t counters[kMaxDepth + 1] = {};
    Collect(words, words + size, counters, 0);
  }

  /*! \brief Append the collected WRITEs to `words`, in the order of `cache_appends.append_keys` in Python. */
  void Encode(Numbers* words) {
    const auto sort_key = [](const WriteOperands& w) {
      return std::make_tuple(w.row, w.gang, w.column, w.bank, w.element);
    };
    std::stable_sort(writes_.begin(), writes_.end(),
                     [&](const WriteOperands& a, const WriteOperands& b) { return sort_key(a) < sort_key(b); });
    int64_t row = -1, gang = -1;
    for (const WriteOperands& w : writes_) {
      if (w.row != row || w.gang != gang) PutNode(words, kGAct, {w.gang}, {w.row});
      row = w.row, gang = w.gang;
      PutNode(words, kWriteNode, {w.gang, w.bank, w.banks}, {w.row, w.column}, {w.count, w.element, w.elements},
              {w.pixel, w.k});
    }
  }

 private:
  /*! \brief Collect WRITEs; iterations of a loop without WRITEs of the tokens are skipped: there are thousands. */
  void Collect(const int64_t* words, const int64_t* end, int64_t* counters, int depth) {
    if (depth > kMaxDepth) return;
    for (const int64_t* node = words; node < end; node += node[1]) {
      if (node[0] == kWriteNode) {
        Write(DecodeWrite(node, counters));
      } else if (node[0] == kLoop) {
        for (counters[depth] = 0; counters[depth] < node[2]; ++counters[depth]) {
          int64_t min_pixel = end_, max_pixel = first_ - 1;
          Pixels(node + 3, node + node[1], counters, depth + 1, &min_pixel, &max_pixel);
          if (min_pixel < end_ && max_pixel >= first_) Collect(node + 3, node + node[1], counters, depth + 1);
        }
        counters[depth] = 0;
      }
    }
  }

  /*! \brief Smallest and largest pixel of WRITEs, over all iterations of the loops from `depth` on. */
  void Pixels(const int64_t* words, const int64_t* end, int64_t* counters, int depth, int64_t* min_pixel,
              int64_t* max_pixel) const {
    if (depth > kMaxDepth) return;
    for (const int64_t* node = words; node < end; node += node[1]) {
      if (node[0] == kWriteNode) {
        const int64_t pixel = DecodeWrite(node, counters).pixel;
        *min_pixel = std::min(*min_pixel, pixel);
        *max_pixel = std::max(*max_pixel, pixel);
      } else if (node[0] == kLoop) {
        for (int64_t iteration : {int64_t{0}, node[2] - 1}) {  // extremes of affines are at the ends
          counters[depth] = iteration;
          Pixels(node + 3, node + node[1], counters, depth + 1, min_pixel, max_pixel);
        }
        counters[depth] = 0;
      }
    }
  }

  void Write(WriteOperands write) {
    const int64_t token = write.pixel / matrices_, matrix = write.pixel % matrices_;
    if (token != positions_[matrix / per_request_]) return;
    write.pixel = matrix;
    writes_.push_back(write);
  }

  const int64_t* positions_;
  const int64_t per_request_, matrices_, first_, end_;  // range of pixels that may be selected
  std::vector<WriteOperands> writes_;
};

template <typename T>
const T* Data(const ffi::TensorView& tensor) {
  return reinterpret_cast<const T*>(static_cast<const char*>(tensor.data_ptr()) + tensor.byte_offset());
}

/*!
 * \brief Words and offsets of a step's program, as `PimProgram.program_words` has them.
 * \param words, offsets Those of the program that writes every place.
 * \param positions [requests] int64.
 */
ffi::Array<ffi::Tensor> StepWriteCommands(ffi::TensorView words, ffi::TensorView offsets, ffi::TensorView positions,
                                          int64_t matrices) {
  const int64_t requests = positions.numel();
  TVM_FFI_ICHECK(requests > 0 && matrices % requests == 0) << "positions do not fit the program";
  const int64_t* stream = Data<int64_t>(words);
  const int64_t* begins = Data<int64_t>(offsets);
  Numbers stream_words, stream_offsets{0};
  for (int64_t channel = 0; channel + 1 < offsets.numel(); ++channel) {
    StepWrites writes(Data<int64_t>(positions), requests, matrices);
    writes.Collect(stream + begins[channel], begins[channel + 1] - begins[channel]);
    writes.Encode(&stream_words);
    stream_offsets.push_back(static_cast<int64_t>(stream_words.size()));
  }
  return {WordTensor(stream_words), WordTensor(stream_offsets)};
}

TVM_FFI_STATIC_INIT_BLOCK() {
  tvm::ffi::reflection::GlobalDef().def("pimflow.simulators.step_writes", StepWriteCommands);
}

}  // namespace
}  // namespace pimflow
