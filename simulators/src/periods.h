/*!
 * \brief A walk over a program that skips whole periods of its loops, with exact results.
 *
 * No clock depends on rows, columns or pixels, so every iteration of a loop is the same function of the engine's
 * state. The state is its clocks relative to the last command (zero for clocks in the past) and its flags
 * (`Engine::State`). An iteration also depends on the slack, the time until the next refresh falls due. Hence
 *
 *  - between two refreshes, a state that occurs a second time repeats until the next refresh falls due;
 *  - state and slack together determine all that follows, including refreshes. Each loop records the pairs of state
 *    and slack at the first iteration boundary after a refresh, and the way from each to the next. A pair that
 *    occurs again, in this run of the loop or in an earlier one, is followed by the same.
 *
 * An engine offers: clock(), deadline() (of the next refresh), refreshes(), totals(), StateWords(),
 * State(words), Restore(words, clock, deadline) and Shift(cycles).
 */
#ifndef PIMFLOW_SIMULATORS_PERIODS_H_
#define PIMFLOW_SIMULATORS_PERIODS_H_

#include <algorithm>
#include <cstring>
#include <unordered_map>
#include <vector>

#include "timing.h"

namespace pimflow {

template <typename Engine>
class PeriodWalk {
 public:
  explicit PeriodWalk(Engine* engine) : engine_(engine), words_(engine->StateWords()), scratch_(words_ + 1) {}

  void Run(const int64_t* words, int64_t size) { RunNodes(words, words + size); }

 private:
  /*! \brief Comparisons with the state at an earlier iteration, between two refreshes. */
  static constexpr int kMaxTries = 16;
  /*! \brief Limit of the records of one loop; beyond it, they are dropped. */
  static constexpr size_t kMaxRecords = 1 << 14;

  /*! \brief A point in the run of a loop. */
  struct Mark {
    int64_t iteration = 0, clock = 0;
    Totals totals;
  };

  /*! \brief State and slack at an iteration boundary, and the way to the next record. */
  struct Record {
    int64_t next = -1;
    int64_t iterations = 0, cycles = 0;
    Totals increase;
    int64_t run = -1;  // last run of the loop that reached it
    Mark mark;         // where that run reached it
  };

  struct LoopHistory {
    std::vector<Record> records;
    std::vector<int64_t> states;  // of the records, state and slack each
    std::unordered_map<uint64_t, int64_t> record_by_hash;
    int64_t run = 0;
    int64_t refreshes = -1;  // number of refreshes when the records were last used
    int64_t current = -1;    // last record that this run reached
    Mark current_mark;
    // An earlier iteration since the last refresh, and its state.
    Mark anchor;
    std::vector<int64_t> anchor_state;
    int64_t reach = 0;
    int tries = 0;
  };

  void RunNodes(const int64_t* node, const int64_t* end) {
    constexpr int64_t kNoCounters[kMaxDepth] = {};
    for (; node < end; node += node[1]) {
      if (node[0] == kLoop) {
        RunLoop(node);
      } else {
        Visit(node, kNoCounters, engine_);
      }
    }
  }

  void RunLoop(const int64_t* node) {
    const int64_t extent = node[2];
    LoopHistory& history = histories_[node];
    ++history.run;
    history.current = -1;
    history.tries = 0;
    for (int64_t i = 0; i < extent;) {
      if (engine_->refreshes() != history.refreshes) {
        CheckInterrupt();
        i = FollowRecords(&history, i, extent);
        history.refreshes = engine_->refreshes();
        history.tries = 0;
        if (i == extent) break;
      }
      RunNodes(node + 3, node + node[1]);
      ++i;
      const bool refreshed = engine_->refreshes() != history.refreshes;
      if (!refreshed && extent - i > 2 && history.tries < kMaxTries) i = SkipToRefresh(&history, i, extent);
    }
  }

  Mark CurrentMark(int64_t iteration) const { return {iteration, engine_->clock(), engine_->totals()}; }

  /*! \brief Add the totals between `earlier` and `clock` so many times; returns the cycles that they take. */
  int64_t Repeat(const Mark& earlier, int64_t clock, int64_t times) {
    const Totals increase = engine_->totals().Since(earlier.totals);
    int64_t cycles;
    const bool fits = !__builtin_mul_overflow(clock - earlier.clock, times, &cycles) &&
                      cycles < (int64_t{1} << 62) - clock;
    if (!fits || !engine_->totals().Add(increase, times)) {
      PIMFLOW_THROW_AT(engine_->totals().streamed) << "the loops around it run beyond 2^62 cycles";
    }
    return cycles;
  }

  int64_t SkipToRefresh(LoopHistory* history, int64_t i, int64_t extent) {
    if (history->tries++ == 0) {
      history->reach = 1;
    } else {
      engine_->State(scratch_.data());
      if (std::equal(history->anchor_state.begin(), history->anchor_state.end(), scratch_.begin())) {
        history->tries = kMaxTries;
        const int64_t period = i - history->anchor.iteration;
        const int64_t cycles = engine_->clock() - history->anchor.clock;
        int64_t times = (extent - i) / period;
        // Every clock that a period compares with the deadline is at most that of its last command.
        if (cycles > 0) times = std::min(times, (engine_->deadline() - 1 - engine_->clock()) / cycles);
        if (times <= 0) return i;
        engine_->Shift(Repeat(history->anchor, engine_->clock(), times));
        return i + times * period;
      }
      if (i - history->anchor.iteration < history->reach) return i;
      history->reach *= 2;
    }
    history->anchor = CurrentMark(i);
    history->anchor_state.resize(words_);
    engine_->State(history->anchor_state.data());
    return i;
  }

  /*! \brief Advance from record to record, starting at that of this state; returns the iteration reached. */
  int64_t FollowRecords(LoopHistory* history, int64_t i, int64_t extent) {
    const int64_t record_index = FindRecord(history);
    if (history->current >= 0) {
      Record& last = history->records[history->current];
      if (last.next < 0) {
        last.next = record_index;
        last.iterations = i - history->current_mark.iteration;
        last.cycles = engine_->clock() - history->current_mark.clock;
        last.increase = engine_->totals().Since(history->current_mark.totals);
      }
    }
    int64_t index = record_index;
    int64_t clock = engine_->clock();
    while (index >= 0) {
      Record& record = history->records[index];
      if (record.run == history->run) {
        const int64_t period = i - record.mark.iteration;
        const int64_t times = (extent - i) / period;
        clock += Repeat(record.mark, clock, times);
        i += times * period;
        ++history->run;  // less than a period remains
      }
      record.run = history->run;
      record.mark = {i, clock, engine_->totals()};
      if (record.next < 0 || record.iterations > extent - i) break;
      i += record.iterations;
      clock += record.cycles;
      engine_->totals().Add(record.increase, 1);
      index = record.next;
    }
    if (index >= 0) {
      const int64_t* state = &history->states[index * (words_ + 1)];
      engine_->Restore(state, clock, clock + state[words_]);
    }
    history->current = index;
    history->current_mark = CurrentMark(i);
    return i;
  }

  /*! \brief The record of the current state and slack, added if it is new; -1 if its hash belongs to another. */
  int64_t FindRecord(LoopHistory* history) {
    engine_->State(scratch_.data());
    scratch_[words_] = engine_->deadline() - engine_->clock();
    uint64_t hash = 0;
    for (int64_t word : scratch_) hash = (hash ^ static_cast<uint64_t>(word)) * 0x9E3779B97F4A7C15u + (hash >> 29);
    if (history->records.size() >= kMaxRecords) {
      history->records.clear();
      history->states.clear();
      history->record_by_hash.clear();
      history->current = -1;
    }
    const auto [entry, is_new] = history->record_by_hash.try_emplace(hash, history->records.size());
    if (is_new) {
      history->records.emplace_back();
      history->states.insert(history->states.end(), scratch_.begin(), scratch_.end());
      return entry->second;
    }
    const int64_t* state = &history->states[entry->second * (words_ + 1)];
    return std::equal(scratch_.begin(), scratch_.end(), state) ? entry->second : -1;
  }

  Engine* engine_;
  size_t words_;
  std::vector<int64_t> scratch_;
  std::unordered_map<const int64_t*, LoopHistory> histories_;
};

}  // namespace pimflow

#endif  // PIMFLOW_SIMULATORS_PERIODS_H_
