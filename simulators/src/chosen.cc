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
class Chosen {
 public:
  Chosen(const int64_t* positions, int64_t requests, int64_t matrices)
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
    const auto place = [](const Stored& w) { return std::make_tuple(w.row, w.gang, w.column, w.bank, w.element); };
    std::stable_sort(found_.begin(), found_.end(),
                     [&](const Stored& a, const Stored& b) { return place(a) < place(b); });
    int64_t row = -1, gang = -1;
    for (const Stored& w : found_) {
      if (w.row != row || w.gang != gang) PutNode(words, kGAct, {w.gang}, {w.row});
      row = w.row, gang = w.gang;
      PutNode(words, kStore, {w.gang, w.bank, w.banks}, {w.row, w.column}, {w.count, w.element, w.elements},
              {w.pixel, w.k});
    }
  }

 private:
  /*! \brief Collect WRITEs; iterations of a loop without WRITEs of the tokens are skipped: there are thousands. */
  void Collect(const int64_t* words, const int64_t* end, int64_t* counters, int depth) {
    if (depth > kMaxDepth) return;
    for (const int64_t* node = words; node < end; node += node[1]) {
      if (node[0] == kStore) {
        Write(StoredAt(node, counters));
      } else if (node[0] == kLoop) {
        for (counters[depth] = 0; counters[depth] < node[2]; ++counters[depth]) {
          int64_t least = end_, most = first_ - 1;
          Pixels(node + 3, node + node[1], counters, depth + 1, &least, &most);
          if (least < end_ && most >= first_) Collect(node + 3, node + node[1], counters, depth + 1);
        }
        counters[depth] = 0;
      }
    }
  }

  /*! \brief Smallest and largest pixel of WRITEs, over all iterations of the loops from `depth` on. */
  void Pixels(const int64_t* words, const int64_t* end, int64_t* counters, int depth, int64_t* least,
              int64_t* most) const {
    if (depth > kMaxDepth) return;
    for (const int64_t* node = words; node < end; node += node[1]) {
      if (node[0] == kStore) {
        const int64_t pixel = StoredAt(node, counters).pixel;
        *least = std::min(*least, pixel);
        *most = std::max(*most, pixel);
      } else if (node[0] == kLoop) {
        for (int64_t turn : {int64_t{0}, node[2] - 1}) {  // extremes of affines are at the ends
          counters[depth] = turn;
          Pixels(node + 3, node + node[1], counters, depth + 1, least, most);
        }
        counters[depth] = 0;
      }
    }
  }

  void Write(Stored stored) {
    const int64_t token = stored.pixel / matrices_, matrix = stored.pixel % matrices_;
    if (token != positions_[matrix / per_request_]) return;
    stored.pixel = matrix;
    found_.push_back(stored);
  }

  const int64_t* positions_;
  const int64_t per_request_, matrices_, first_, end_;  // range of pixels that may be selected
  std::vector<Stored> found_;
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
ffi::Array<ffi::Tensor> ChosenCommands(ffi::TensorView words, ffi::TensorView offsets, ffi::TensorView positions,
                                       int64_t matrices) {
  const int64_t requests = positions.numel();
  TVM_FFI_ICHECK(requests > 0 && matrices % requests == 0) << "positions do not fit the program";
  const int64_t* stream = Data<int64_t>(words);
  const int64_t* begin = Data<int64_t>(offsets);
  Numbers found, starts{0};
  for (int64_t channel = 0; channel + 1 < offsets.numel(); ++channel) {
    Chosen chosen(Data<int64_t>(positions), requests, matrices);
    chosen.Collect(stream + begin[channel], begin[channel + 1] - begin[channel]);
    chosen.Encode(&found);
    starts.push_back(static_cast<int64_t>(found.size()));
  }
  return {WordTensor(found), WordTensor(starts)};
}

TVM_FFI_STATIC_INIT_BLOCK() {
  tvm::ffi::reflection::GlobalDef().def("pimflow.simulators.chosen", ChosenCommands);
}

}  // namespace
}  // namespace pimflow
