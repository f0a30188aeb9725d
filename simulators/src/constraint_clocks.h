/*!
 * \brief The state of a table of constraints: the earliest clock at which each command may issue.
 */
#ifndef PIMFLOW_SIMULATORS_CONSTRAINT_CLOCKS_H_
#define PIMFLOW_SIMULATORS_CONSTRAINT_CLOCKS_H_

#include <algorithm>
#include <cstdint>
#include <vector>

#include "timing.h"

namespace pimflow {

enum Level : int64_t { kChannelLevel, kGangLevel, kBufferLevel };

/*! \brief Bit of the begin of the stream (clock 0) in a set of earlier commands. */
constexpr int kBegin = kNumCommands;

/*! \brief A row of the constraint table, as Python passes it; sets of commands are bit masks. */
struct Constraint {
  int64_t level, before, after, cycles, per_burst_cycles, window;
};

/*! \brief A command with the operands that constraints and the issued stream use. */
struct Issue {
  Command command;
  int64_t gang = -1, buffer = -1, row = -1, column = -1, bursts = 0;
  int64_t latch = -1;  // of a COMP, READRES, WRBIAS or AF, whose buffer is that of the latch
};

class ConstraintClocks {
 public:
  ConstraintClocks(int64_t gangs, int64_t buffers, const Constraint* rules, int64_t num_rules)
      : gangs_(gangs),
        buffers_(buffers),
        every_gang_(kNumCommands),
        any_gang_(2 * kNumCommands),
        gang_(3 * kNumCommands),
        buffer_(gang_ + gangs * kNumCommands),
        clocks_(buffer_ + buffers * kNumCommands) {
    for (int64_t i = 0; i < num_rules; ++i) AddConstraint(rules[i]);
  }

  /*! \brief Earliest clock of a command that the table allows. */
  int64_t Earliest(const Issue& next) const {
    const int64_t* earliest = clocks_.data() + next.command;
    int64_t t = earliest[0];
    if (UsesAllGangs(next.command)) t = std::max(t, earliest[any_gang_]);
    if (next.gang >= 0) t = std::max({t, earliest[gang_ + next.gang * kNumCommands], earliest[every_gang_]});
    if (next.buffer >= 0) t = std::max(t, earliest[buffer_ + next.buffer * kNumCommands]);
    return t;
  }

  /*! \brief Delay the commands that are constrained by one issued at `t`. */
  void Constrain(const Issue& issue, int64_t t) {
    const int64_t later_bursts = std::max<int64_t>(issue.bursts, 1) - 1;
    for (const Delay& delay : delays_[issue.command]) {
      Postpone(delay.slot + delay.slots_per_gang * issue.gang + delay.slots_per_buffer * issue.buffer,
               t + delay.cycles + delay.per_burst_cycles * later_bursts);
    }
    for (const WindowedRule& windowed : windowed_) {
      const Constraint& rule = windowed.constraint;
      if (rule.before >> issue.command & 1) {
        Slide(windowed, issue, t + rule.cycles + rule.per_burst_cycles * later_bursts);
      }
    }
  }

  /*! \brief Cycles between COMPs of a run, which only the previous COMP constrains; 0 if runs are not possible. */
  int64_t comp_step() const { return comp_runs_ ? std::max<int64_t>(1, comp_to_comp_) : 0; }

  /*! \brief All clocks, including those of windowed rules; clocks in the past constrain nothing. */
  std::vector<int64_t>& clocks() { return clocks_; }
  const std::vector<int64_t>& clocks() const { return clocks_; }

 private:
  /*! \brief A constraint of window 1, as the clock that it delays: one of the channel, a gang or a buffer. */
  struct Delay {
    int64_t slot, slots_per_gang, slots_per_buffer;
    int64_t cycles, per_burst_cycles;
  };

  /*! \brief A rule on the `window`-th last command, and the clocks until which the last ones constrain. */
  struct WindowedRule {
    Constraint constraint;
    int64_t instances;  // one for the channel, or one per gang or buffer
    int64_t slot;       // of the first instance's oldest clock
  };

  static bool UsesAllGangs(int command) { return command == kCOMP || command == kAF || command == kREF; }
  static bool UsesOneGang(int command) { return command == kG_ACT || command == kPRE || command == kWRITE; }
  static bool UsesBuffer(int command) {
    return command == kGWRITE || command == kCOMP || command == kREADRES || command == kWRBIAS || command == kAF;
  }

  void AddConstraint(const Constraint& constraint) {
    constexpr int64_t kComp = int64_t{1} << kCOMP;
    for (int after = 0; constraint.before >> kBegin & 1 && after < kNumCommands; ++after) {
      if (constraint.after >> after & 1) Postpone(after, constraint.cycles);
    }
    if (constraint.window > 1) {
      const int64_t instances = constraint.level == kChannelLevel ? 1
                                : constraint.level == kGangLevel  ? gangs_
                                                                  : buffers_;
      windowed_.push_back({constraint, instances, static_cast<int64_t>(clocks_.size())});
      clocks_.resize(clocks_.size() + instances * constraint.window);
      if (constraint.before & kComp) comp_runs_ = false;
      return;
    }
    if (constraint.before & constraint.after & kComp) {
      comp_to_comp_ = std::max(comp_to_comp_, constraint.cycles);
    }
    for (int before = 0; before < kNumCommands; ++before) {
      for (int after = 0; after < kNumCommands; ++after) {
        if (constraint.before >> before & constraint.after >> after & 1) AddDelay(constraint, before, after);
      }
    }
  }

  /*! \brief Add a delay from `before` to `after`, on the clock of the channel, gang or buffer that they share. */
  void AddDelay(const Constraint& constraint, int before, int after) {
    Delay delay{after, 0, 0, constraint.cycles, constraint.per_burst_cycles};
    if (constraint.level == kBufferLevel) {
      if (!UsesBuffer(before) || !UsesBuffer(after)) return;
      delay.slot += buffer_;
      delay.slots_per_buffer = kNumCommands;
    } else if (constraint.level == kGangLevel) {
      if (UsesAllGangs(after) && (UsesAllGangs(before) || UsesOneGang(before))) {
        delay.slot += any_gang_;
      } else if (UsesOneGang(after) && UsesAllGangs(before)) {
        delay.slot += every_gang_;
      } else if (UsesOneGang(after) && UsesOneGang(before)) {
        delay.slot += gang_;
        delay.slots_per_gang = kNumCommands;
      } else {
        return;
      }
    }
    for (Delay& known_delay : delays_[before]) {
      if (known_delay.slot == delay.slot && known_delay.per_burst_cycles == delay.per_burst_cycles) {
        known_delay.cycles = std::max(known_delay.cycles, delay.cycles);
        return;
      }
    }
    delays_[before].push_back(delay);
  }

  void Postpone(int64_t slot, int64_t until) { clocks_[slot] = std::max(clocks_[slot], until); }

  void Slide(const WindowedRule& windowed, const Issue& issue, int64_t until) {
    const Constraint& rule = windowed.constraint;
    for (int64_t i = 0; i < windowed.instances; ++i) {
      if (rule.level == kGangLevel && !UsesAllGangs(issue.command) && issue.gang != i) continue;
      if (rule.level == kBufferLevel && issue.buffer != i) continue;
      int64_t* oldest = &clocks_[windowed.slot + i * rule.window];
      std::copy(oldest + 1, oldest + rule.window, oldest);
      oldest[rule.window - 1] = until;
      const int64_t binds_until = *oldest;
      for (int after = 0; after < kNumCommands; ++after) {
        if (!(rule.after >> after & 1)) continue;
        if (rule.level == kChannelLevel) {
          Postpone(after, binds_until);
        } else if (rule.level == kBufferLevel) {
          Postpone(buffer_ + i * kNumCommands + after, binds_until);
        } else {
          Postpone(gang_ + i * kNumCommands + after, binds_until);
          Postpone(any_gang_ + after, binds_until);
        }
      }
    }
  }

  int64_t gangs_, buffers_;
  std::vector<Delay> delays_[kNumCommands];  // by earlier command
  std::vector<WindowedRule> windowed_;
  bool comp_runs_ = true;
  int64_t comp_to_comp_ = 0;

  // Earliest clocks by command: by rules of the channel; imposed by COMP and REF on every gang; the latest over
  // all gangs; of each gang; of each buffer; then the clocks of windowed rules.
  int64_t every_gang_, any_gang_, gang_, buffer_;
  std::vector<int64_t> clocks_;
};

}  // namespace pimflow

#endif  // PIMFLOW_SIMULATORS_CONSTRAINT_CLOCKS_H_
