/*!
 * \brief The order in which a channel opens rows, and the contents of the buffers for each.
 *
 * A RowVisit is one open row. A Nest has the visits of a block of work in order, and rolls them into loops.
 */
#ifndef PIMFLOW_PIM_BACKEND_VISITS_H_
#define PIMFLOW_PIM_BACKEND_VISITS_H_

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

  bool operator!=(const Contents& other) const { return first != other.first || pixels != other.pixels; }
};

/*! \brief An open row with the contents of the buffers; if it is `complete`, results are read after it. */
struct RowVisit {
  int64_t tile, chunk;
  std::vector<Contents> contents;
  bool complete;
  std::vector<int64_t> active;  // buffers that are used

  RowVisit(int64_t of_tile, int64_t of_chunk, std::vector<Contents> held, bool is_complete)
      : tile(of_tile), chunk(of_chunk), contents(std::move(held)), complete(is_complete) {
    for (size_t b = 0; b < contents.size(); ++b) {
      if (contents[b].pixels) active.push_back(static_cast<int64_t>(b));
    }
  }

  bool IsActive(int64_t buffer) const { return contents[buffer].pixels > 0; }

  /*! \brief Buffers whose contents differ from those in the visit before; all active ones if there is none. */
  std::vector<int64_t> WrittenAfter(const RowVisit* before) const {
    if (!before) return active;
    std::vector<int64_t> written;
    for (int64_t b : active) {
      if (chunk != before->chunk || contents[b] != before->contents[b]) written.push_back(b);
    }
    return written;
  }
};

/*! \brief The visits of a block of pixels (in groups that fill the buffers) by tiles from `first_tile` on. */
class Nest {
 public:
  /*! \param apart Offset of a pixel's vectors from one matrix to the next; 0 if all tiles are of one matrix. */
  Nest(const LoopOrder& order, const BankTiling& tiling, int64_t pixels, int64_t first_tile, int64_t tiles,
       int64_t apart)
      : order_(order), tiling_(tiling), pixels_(pixels), first_tile_(first_tile), apart_(apart) {
    groups_ = CeilDiv(pixels, order.buffers * order.pixels);
    per_buffer_ = CeilDiv(pixels, groups_ * order.buffers);
    const bool input = order.stationary == kInput;
    outer_ = input ? 1 : tiles;
    inner_ = input ? tiles : tiling.chunks;
    int64_t last = 0;
    for (int64_t b = 0; b < order.buffers; ++b) {
      starts_.push_back(order.staggered ? b * tiles / order.buffers : 0);
      if (Held(groups_ - 1, b).pixels) last = std::max(last, starts_[b]);
      if (order.staggered && Held(groups_ - 2, b).pixels) last = std::max(last, starts_[b] - inner_);
    }
    size_ = outer_ * groups_ * inner_ + last;
  }

  /*! \brief Commands of all visits, with loops; `emit` returns those of a visit from (before, visit, after). */
  template <typename Emit>
  Nodes Commands(const Emit& emit) const {
    auto at = [&](int64_t index) {
      const RowVisit visit = (*this)[index];
      if (size_ == 1) return emit(nullptr, visit, nullptr);
      if (index == 0) return Between(emit, nullptr, visit, index + 1);
      const RowVisit before = (*this)[index - 1];
      if (index + 1 == size_) return emit(&before, visit, nullptr);
      return Between(emit, &before, visit, index + 1);
    };
    if (order_.staggered) {
      auto sweep = [&](int64_t number) {
        Nodes nodes;
        for (size_t b = 0; b < starts_.size(); ++b) {
          const int64_t base = number * inner_ + starts_[b];
          const int64_t end = b + 1 < starts_.size() ? starts_[b + 1] : inner_;
          const int64_t count = std::min(end - starts_[b], size_ - base);
          auto visit = [&](int64_t step) { return at(base + step); };
          Append(&nodes, Roll(order_.loops, visit, count, tiling_.chunks_per_row));
        }
        return nodes;
      };
      return Roll(order_.loops, sweep, CeilDiv(size_, inner_), 1, 1, 3);
    }
    auto over_groups = [&](int64_t turn) {
      auto over_visits = [&](int64_t group) {
        const int64_t base = (turn * groups_ + group) * inner_;
        auto visit = [&](int64_t step) { return at(base + step); };
        return Roll(order_.loops, visit, inner_, tiling_.chunks_per_row);
      };
      return Roll(order_.loops, over_visits, groups_, inner_ > 1 ? 2 : 1, 2, 2);
    };
    return Roll(order_.loops, over_groups, outer_, 2 * tiling_.Period());
  }

 private:
  template <typename Emit>
  Nodes Between(const Emit& emit, const RowVisit* before, const RowVisit& visit, int64_t next) const {
    const RowVisit after = (*this)[next];
    return emit(before, visit, &after);
  }

  /*! \brief The pixels of a buffer in a group; pixels count from `first`. */
  Contents Held(int64_t group, int64_t buffer, int64_t first = 0) const {
    if (group < 0 || group >= groups_) return Contents{};
    const int64_t begin = (group * order_.buffers + buffer) * per_buffer_;
    const int64_t count = std::min(per_buffer_, pixels_ - begin);
    return count > 0 ? Contents{first + begin, count} : Contents{};
  }

  RowVisit operator[](int64_t index) const {
    const int64_t rest = index / inner_, turn = rest / groups_;
    int64_t step = index % inner_, group = rest % groups_;
    const bool complete = tiling_.chunks == 1 || step == inner_ - 1;
    std::vector<Contents> contents;
    if (order_.staggered) {
      for (int64_t b = 0; b < order_.buffers; ++b) {
        contents.push_back(Held(FloorDiv(index - starts_[b], inner_), b));
      }
    } else {
      // Each level alternates its direction, and so begins with the contents of the buffers. But an incomplete group
      // leaves buffers idle, so that it is better to begin with a full group.
      if (rest % 2) step = inner_ - 1 - step;
      // Buffers hold no vectors of another matrix.
      const bool whole = pixels_ % (order_.buffers * per_buffer_) == 0;
      if (turn % 2 && whole && !apart_) group = groups_ - 1 - group;
      const int64_t first = apart_ ? apart_ * tiling_.Matrix(first_tile_ + turn) : 0;
      for (int64_t b = 0; b < order_.buffers; ++b) contents.push_back(Held(group, b, first));
    }
    const bool input = order_.stationary == kInput;
    return RowVisit(first_tile_ + (input ? step : turn), input ? 0 : step, std::move(contents), complete);
  }

  const LoopOrder& order_;
  const BankTiling& tiling_;
  int64_t pixels_, first_tile_, apart_;
  int64_t groups_, per_buffer_, outer_, inner_, size_;
  std::vector<int64_t> starts_;  // index of the visit at which each buffer is filled for the first time
};

}  // namespace pimflow::lowering

#endif  // PIMFLOW_PIM_BACKEND_VISITS_H_
