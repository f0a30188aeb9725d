/*!
 * \brief The order in which a channel opens rows, and the contents of the buffers for each.
 *
 * A RowIteration is one open row. A LoopNest has those of a block of work in order, and rolls them into loops.
 */
#ifndef PIMFLOW_PIM_BACKEND_LOOP_NEST_H_
#define PIMFLOW_PIM_BACKEND_LOOP_NEST_H_

#include <algorithm>
#include <numeric>
#include <vector>

#include "nodes.h"

namespace pimflow::lowering {

inline int64_t CeilDiv(int64_t a, int64_t b) { return (a + b - 1) / b; }

/*! \brief Division that rounds down, for negative numbers too. */
inline int64_t FloorDiv(int64_t a, int64_t b) { return a >= 0 ? a / b : -CeilDiv(-a, b); }

enum Stationary : int64_t { kInput = 0, kWeight = 1, kOutput = 2 };

/*! \brief A loop order; see `Schedule` in Python. `gangs` are those of a tile; `loops` is an argument of `Roll`. */
struct LoopOrder {
  Stationary stationary;
  int64_t buffers, pixels, gangs, accumulators;
  bool staggered, overlap, resumed, loops;
};

/*! \brief How a reduction lies in rows and buffers; see `BankTiling` in Python. */
struct BankTiling {
  int64_t chunks, columns, chunks_per_row, elements_per_column, outputs, tiles, matrices;

  int64_t TilesOfMatrix() const { return tiles / matrices; }
  int64_t Period() const { return std::lcm(chunks_per_row, matrices > 1 ? TilesOfMatrix() : 1); }
  int64_t Matrix(int64_t tile) const { return matrices > 1 ? tile / TilesOfMatrix() : 0; }
  int64_t Channel(int64_t tile) const { return (matrices > 1 ? tile % TilesOfMatrix() : tile) * outputs; }
  int64_t Row(int64_t tile, int64_t chunk) const { return (tile * chunks + chunk) / chunks_per_row; }
  int64_t PlaceInRow(int64_t tile, int64_t chunk) const { return (tile * chunks + chunk) % chunks_per_row; }
};

/*! \brief Consecutive pixels in a buffer; none if the buffer is not used. */
struct Contents {
  int64_t first = 0, pixels = 0;

  bool operator!=(const Contents& x) const { return first != x.first || pixels != x.pixels; }
};

/*! \brief An open row with the contents of the buffers; if it is `complete`, results are read after it. */
struct RowIteration {
  int64_t tile, chunk;
  std::vector<Contents> contents;
  bool complete;
  std::vector<int64_t> active;  // buffers that are used

  RowIteration(int64_t tile_index, int64_t chunk_index, std::vector<Contents> buffers, bool is_complete)
      : tile(tile_index), chunk(chunk_index), contents(std::move(buffers)), complete(is_complete) {
    for (size_t b = 0; b < contents.size(); ++b) {
      if (contents[b].pixels) active.push_back(static_cast<int64_t>(b));
    }
  }

  bool IsActive(int64_t buffer) const { return contents[buffer].pixels > 0; }

  /*! \brief Buffers whose contents differ from those in the iteration before; all active ones if there is none. */
  std::vector<int64_t> ChangedBuffers(const RowIteration* previous) const {
    if (!previous) return active;
    std::vector<int64_t> written;
    for (int64_t b : active) {
      if (chunk != previous->chunk || contents[b] != previous->contents[b]) written.push_back(b);
    }
    return written;
  }
};

/*! \brief The iterations of a block of pixels (in groups that fill the buffers) by tiles from `first_tile` on. */
class LoopNest {
 public:
  /*! \param matrix_stride Offset of a pixel's vectors from one matrix to the next; 0 if all tiles are of one matrix. */
  LoopNest(const LoopOrder& order, const BankTiling& tiling, int64_t pixels, int64_t first_tile, int64_t tiles,
           int64_t matrix_stride)
      : order_(order), tiling_(tiling), pixels_(pixels), first_tile_(first_tile), matrix_stride_(matrix_stride) {
    groups_ = CeilDiv(pixels, order.buffers * order.pixels);
    per_buffer_ = CeilDiv(pixels, groups_ * order.buffers);
    const bool input = order.stationary == kInput;
    outer_ = input ? 1 : tiles;
    inner_ = input ? tiles : tiling.chunks;
    int64_t last = 0;
    for (int64_t b = 0; b < order.buffers; ++b) {
      starts_.push_back(order.staggered ? b * tiles / order.buffers : 0);
      if (GroupContents(groups_ - 1, b).pixels) last = std::max(last, starts_[b]);
      if (order.staggered && GroupContents(groups_ - 2, b).pixels) last = std::max(last, starts_[b] - inner_);
    }
    size_ = outer_ * groups_ * inner_ + last;
  }

  /*! \brief Commands of all iterations, with loops; `emit` returns those of one from (previous, iteration, next). */
  template <typename Emit>
  Nodes Commands(const Emit& emit) const {
    auto emit_index = [&](int64_t index) {
      const RowIteration iteration = (*this)[index];
      if (size_ == 1) return emit(nullptr, iteration, nullptr);
      if (index == 0) return EmitBetween(emit, nullptr, iteration, index + 1);
      const RowIteration previous = (*this)[index - 1];
      if (index + 1 == size_) return emit(&previous, iteration, nullptr);
      return EmitBetween(emit, &previous, iteration, index + 1);
    };
    if (order_.staggered) {
      auto sweep = [&](int64_t number) {
        Nodes nodes;
        for (size_t b = 0; b < starts_.size(); ++b) {
          const int64_t base = number * inner_ + starts_[b];
          const int64_t end = b + 1 < starts_.size() ? starts_[b + 1] : inner_;
          const int64_t count = std::min(end - starts_[b], size_ - base);
          auto iteration = [&](int64_t step) { return emit_index(base + step); };
          Append(&nodes, Roll(order_.loops, iteration, count, tiling_.chunks_per_row));
        }
        return nodes;
      };
      return Roll(order_.loops, sweep, CeilDiv(size_, inner_), 1, 1, 3);
    }
    auto over_groups = [&](int64_t outer_index) {
      auto over_rows = [&](int64_t group) {
        const int64_t base = (outer_index * groups_ + group) * inner_;
        auto iteration = [&](int64_t step) { return emit_index(base + step); };
        return Roll(order_.loops, iteration, inner_, tiling_.chunks_per_row);
      };
      return Roll(order_.loops, over_rows, groups_, inner_ > 1 ? 2 : 1, 2, 2);
    };
    return Roll(order_.loops, over_groups, outer_, 2 * tiling_.Period());
  }

 private:
  template <typename Emit>
  Nodes EmitBetween(const Emit& emit, const RowIteration* previous, const RowIteration& iteration,
                    int64_t next_index) const {
    const RowIteration next = (*this)[next_index];
    return emit(previous, iteration, &next);
  }

  /*! \brief The pixels of a buffer in a group; pixels count from `first`. */
  Contents GroupContents(int64_t group, int64_t buffer, int64_t first = 0) const {
    if (group < 0 || group >= groups_) return Contents{};
    const int64_t begin = (group * order_.buffers + buffer) * per_buffer_;
    const int64_t count = std::min(per_buffer_, pixels_ - begin);
    return count > 0 ? Contents{first + begin, count} : Contents{};
  }

  RowIteration operator[](int64_t index) const {
    const int64_t outer_step = index / inner_, outer_index = outer_step / groups_;
    int64_t step = index % inner_, group = outer_step % groups_;
    const bool complete = tiling_.chunks == 1 || step == inner_ - 1;
    std::vector<Contents> contents;
    if (order_.staggered) {
      for (int64_t b = 0; b < order_.buffers; ++b) {
        contents.push_back(GroupContents(FloorDiv(index - starts_[b], inner_), b));
      }
    } else {
      // Each level alternates its direction, and so begins with the contents of the buffers. But an incomplete group
      // leaves buffers idle, so that it is better to begin with a full group.
      if (outer_step % 2) step = inner_ - 1 - step;
      // Buffers hold no vectors of another matrix.
      const bool is_full = pixels_ % (order_.buffers * per_buffer_) == 0;
      if (outer_index % 2 && is_full && !matrix_stride_) group = groups_ - 1 - group;
      const int64_t first = matrix_stride_ ? matrix_stride_ * tiling_.Matrix(first_tile_ + outer_index) : 0;
      for (int64_t b = 0; b < order_.buffers; ++b) contents.push_back(GroupContents(group, b, first));
    }
    const bool input = order_.stationary == kInput;
    return RowIteration(first_tile_ + (input ? step : outer_index), input ? 0 : step, std::move(contents), complete);
  }

  const LoopOrder& order_;
  const BankTiling& tiling_;
  int64_t pixels_, first_tile_, matrix_stride_;
  int64_t groups_, per_buffer_, outer_, inner_, size_;
  std::vector<int64_t> starts_;  // index of the iteration at which each buffer is filled for the first time
};

}  // namespace pimflow::lowering

#endif  // PIMFLOW_PIM_BACKEND_LOOP_NEST_H_
