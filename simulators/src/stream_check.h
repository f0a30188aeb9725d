/*!
 * \brief Checks of a command stream that need no timing: operands out of range, COMPs and AFs on rows that are
 * not open, READRESs of empty latches, and the number of used columns of opened rows.
 *
 * Loops are run until an iteration does not change the state, but for rows that move by the loop's step (`RowStep`);
 * all later iterations are then the same.
 */
#ifndef PIMFLOW_SIMULATORS_STREAM_CHECK_H_
#define PIMFLOW_SIMULATORS_STREAM_CHECK_H_

#include <algorithm>
#include <vector>

#include "timing.h"

namespace pimflow {

/*! \brief Bounds of operands. */
struct Organisation {
  int64_t gangs, buffers, latches, columns_per_row, rows;
};

class StreamCheck {
 public:
  explicit StreamCheck(const Organisation& organisation)
      : bounds_(organisation), mask_words_((organisation.columns_per_row + 63) / 64) {
    state_.stream_row.assign(organisation.gangs, -1);
    state_.latch_is_set.assign(organisation.latches, 0);
    state_.used.assign(organisation.gangs * mask_words_, 0);
    state_.used_in_all.assign(mask_words_, 0);
    used_in_some_.assign(mask_words_, 0);
  }

  struct Counts {
    int64_t streamed = 0, violations = 0, empty_reads = 0, used_columns = 0;
  };

  /*! \brief Counts so far; a used column counts for each gang, once for each time that the stream opens its row. */
  const Counts& counts() const { return counts_; }
  int64_t first_violation() const { return first_violation_; }

  void Run(const int64_t* words, int64_t size) {
    int64_t counters[kMaxDepth + 1] = {};
    RunNodes(words, words + size, counters, 0);
  }

  void Gwrite(int64_t buffer, int64_t, int64_t, int64_t, int64_t) {
    CheckRange("buffer", buffer, bounds_.buffers);
    ++counts_.streamed;
  }

  void GAct(int64_t gang, int64_t row) {
    CheckRange("gang", gang, bounds_.gangs);
    CheckRange("row", row, bounds_.rows);
    state_.stream_row[gang] = row;
    state_.comp_row = row;
    for (int64_t row_of_gang : state_.stream_row) state_.comp_row = row_of_gang == row ? state_.comp_row : -1;
    Reopen(gang);
    ++counts_.streamed;
  }

  void Comp(int64_t buffer, int64_t row, int64_t column, int64_t count) {
    CheckRange("buffer", buffer, bounds_.latches);
    CheckRange("row", row, bounds_.rows);
    CheckRange("column", column, bounds_.columns_per_row);
    if (count > 1) CheckRange("column", column + count - 1, bounds_.columns_per_row);
    if (row != state_.comp_row) {
      if (counts_.violations == 0) first_violation_ = counts_.streamed;
      counts_.violations += count;
    }
    state_.latch_is_set[buffer] = 1;
    MarkColumns(column, column + count);
    counts_.streamed += count;
  }

  void Readres(int64_t buffer, int64_t, int64_t) {
    CheckRange("buffer", buffer, bounds_.latches);
    counts_.empty_reads += !state_.latch_is_set[buffer];
    state_.latch_is_set[buffer] = 0;
    ++counts_.streamed;
  }

  void Wrbias(int64_t buffer, int64_t, int64_t, bool) {
    CheckRange("buffer", buffer, bounds_.latches);
    ++counts_.streamed;
  }

  void Af(int64_t buffer, int64_t row) {
    CheckRange("buffer", buffer, bounds_.latches);
    CheckRange("row", row, bounds_.rows);
    if (row != state_.comp_row) {
      if (counts_.violations == 0) first_violation_ = counts_.streamed;
      ++counts_.violations;
    }
    ++counts_.streamed;
  }

  void Write(const WriteOperands& write) {
    CheckRange("gang", write.gang, bounds_.gangs);
    CheckRange("row", write.row, bounds_.rows);
    CheckRange("column", write.column + write.count - 1, bounds_.columns_per_row);
    if (state_.stream_row[write.gang] != write.row) {
      if (counts_.violations == 0) first_violation_ = counts_.streamed;
      ++counts_.violations;
    }
    ++counts_.streamed;
  }

 private:
  struct State {
    std::vector<int64_t> stream_row;  // row that the stream opened last, by gang
    int64_t comp_row = -1;            // that row, if it is the same in every gang
    std::vector<char> latch_is_set;
    // Used columns of the open row of each gang, and those used in all gangs since the last G_ACT.
    std::vector<uint64_t> used, used_in_all;

    bool operator==(const State& state) const {
      return stream_row == state.stream_row && latch_is_set == state.latch_is_set && used == state.used &&
             used_in_all == state.used_in_all;
    }
  };

  void CheckRange(const char* operand, int64_t index, int64_t size) const {
    if (__builtin_expect(static_cast<uint64_t>(index) >= static_cast<uint64_t>(size), 0)) {
      PIMFLOW_THROW_AT(counts_.streamed) << operand << " " << index << " is out of range: the device has " << size;
    }
  }

  /*! \brief Mark all columns of a row that a G_ACT opens as unused. */
  void Reopen(int64_t gang) {
    for (int64_t w = 0; w < mask_words_; ++w) {
      uint64_t any_gang = 0;
      for (int64_t g = 0; g < bounds_.gangs; ++g) {
        uint64_t& used = state_.used[g * mask_words_ + w];
        used = g == gang ? 0 : used | state_.used_in_all[w];
        any_gang |= used;
      }
      used_in_some_[w] = any_gang;
      state_.used_in_all[w] = 0;
    }
    opened_gangs_ = 0;
    for (int64_t row_of_gang : state_.stream_row) opened_gangs_ += row_of_gang >= 0;
  }

  void MarkColumns(int64_t begin, int64_t end) {
    while (begin < end) {
      const int64_t w = begin / 64, stop = std::min(end, (w + 1) * 64), width = stop - begin;
      const uint64_t bits = ~uint64_t{0} >> (64 - width) << (begin % 64);
      begin = stop;
      const uint64_t new_bits = bits & ~state_.used_in_all[w];
      if (new_bits == 0) continue;
      if (new_bits == bits && (new_bits & used_in_some_[w]) == 0) {
        counts_.used_columns += opened_gangs_ * width;
      } else {
        for (int64_t g = 0; g < bounds_.gangs; ++g) {
          const uint64_t unused = new_bits & ~state_.used[g * mask_words_ + w];
          counts_.used_columns += state_.stream_row[g] >= 0 ? __builtin_popcountll(unused) : 0;
        }
      }
      state_.used_in_all[w] |= bits;
    }
  }

  void RunNodes(const int64_t* node, const int64_t* end, int64_t* counters, int depth) {
    for (; node < end; node += node[1]) {
      if (node[0] == kLoop) {
        RunLoop(node, counters, depth);
      } else {
        Visit(node, counters, this);
      }
    }
  }

  void RunLoop(const int64_t* node, int64_t* counters, int depth) {
    const int64_t *body = node + 3, *end = node + node[1], extent = node[2];
    bool has_rows = false;
    int64_t step = 0;
    const bool repeats = RowStep(body, end, depth, &has_rows, &step);
    for (counters[depth] = 0; counters[depth] < extent;) {
      if ((++iterations_ & 0xffff) == 0) CheckInterrupt();
      if (!repeats || extent - counters[depth] < 2) {
        RunNodes(body, end, counters, depth + 1);
        ++counters[depth];
        continue;
      }
      State expected = state_;
      MoveRows(&expected, step);
      const Counts before = counts_;
      RunNodes(body, end, counters, depth + 1);
      ++counters[depth];
      if (state_ == expected) {
        const int64_t remaining = extent - counters[depth];
        Repeat(before, remaining);
        MoveRows(&state_, step * remaining);
        break;
      }
    }
    counters[depth] = 0;
  }

  /*! \brief Whether all rows of a body move by the same `step` in each iteration, and columns of COMPs stay. */
  static bool RowStep(const int64_t* node, const int64_t* end, int depth, bool* has_rows, int64_t* step) {
    for (; node < end; node += node[1]) {
      const int64_t* arg = node + 2;
      if (node[0] == kLoop) {
        if (!RowStep(node + 3, node + node[1], depth, has_rows, step)) return false;
      } else if (node[0] == kGAct || node[0] == kComp || node[0] == kWriteNode || node[0] == kAfNode) {
        const int64_t row_step = arg[(node[0] == kWriteNode ? 4 : 2) + depth];
        if (*has_rows && row_step != *step) return false;
        if (node[0] == kComp && arg[2 + kAffineWords + depth] != 0) return false;
        *has_rows = true;
        *step = row_step;
      }
    }
    return true;
  }

  static void MoveRows(State* state, int64_t by) {
    for (int64_t& row : state->stream_row) row += row >= 0 ? by : 0;
    if (state->comp_row >= 0) state->comp_row += by;
  }

  void Repeat(const Counts& before, int64_t times) {
    const auto add = [&](int64_t* count, int64_t earlier) {
      int64_t increase;
      if (__builtin_mul_overflow(*count - earlier, times, &increase) ||
          __builtin_add_overflow(*count, increase, count)) {
        PIMFLOW_THROW_AT(before.streamed) << "the loops around it hold more than 2^63 commands";
      }
    };
    add(&counts_.streamed, before.streamed);
    add(&counts_.violations, before.violations);
    add(&counts_.empty_reads, before.empty_reads);
    add(&counts_.used_columns, before.used_columns);
  }

  Organisation bounds_;
  int64_t mask_words_;
  State state_;
  // Derived from the state: columns used in any gang before the last G_ACT, and number of gangs with a row.
  std::vector<uint64_t> used_in_some_;
  int64_t opened_gangs_ = 0;
  Counts counts_;
  int64_t first_violation_ = -1;
  uint64_t iterations_ = 0;
};

}  // namespace pimflow

#endif  // PIMFLOW_SIMULATORS_STREAM_CHECK_H_
