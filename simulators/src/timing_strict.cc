/*!
 * \brief The `strict` timing: in-order issue under a table of constraints, with refresh.
 *
 * One command a clock, the first at clock 1, each at the earliest clock its constraints allow. The
 * engine adds what the stream leaves to the controller:
 *
 *  - A G_ACT to a gang that has a row open is preceded by a PRE of that gang, also for the same row.
 *  - At every clock k*nREFI one refresh falls due. A command that could not issue before the earliest
 *    unserved one waits for it: PRE of each open gang in order, then REF, all at or after the due clock.
 *  - A COMP is preceded by a G_ACT, in gang order, of each gang that a refresh closed since the stream
 *    opened it. Gangs that the stream itself opens before its next COMP are not reopened.
 *
 * A COMP that names another row than the stream opened last in every gang is counted, not repaired.
 *
 * cycles = max(last issue + 1, READRES + nCL + nBL*bursts, GWRITE + nBL*bursts) over all READRES and
 * GWRITE; 0 for an empty stream. Refreshes that fall due after the last issue are not served.
 */
#include <tvm/ffi/tvm_ffi.h>

#include <algorithm>
#include <limits>
#include <vector>

#include "timing.h"

namespace pimflow {
namespace {

namespace ffi = tvm::ffi;

enum Level : int64_t { kChannelLevel, kGangLevel, kBufferLevel };

/*! \brief Refreshes in a row after which the stream is declared starved. */
constexpr int kMaxRefreshesInARow = 1024;
constexpr int kIssuedColumns = 7;

/*! \brief A row of the constraint table, as Python passes it; sets of commands are bit masks. */
struct Constraint {
  int64_t level, before, after, cycles, per_burst_cycles, window;
};

struct Device {
  int64_t gangs, buffers, columns_per_row, readres_bursts, nCL, nBL, nREFI;
};

/*! \brief A constraint between one pair of commands. */
struct Rule {
  int64_t level;
  int after;
  int64_t cycles, per_burst_cycles;
};

/*! \brief Earliest clock of each command, as far as one channel, gang or buffer is concerned. */
struct Earliest {
  int64_t clock[kNumCommands] = {};

  void Delay(int command, int64_t until) { clock[command] = std::max(clock[command], until); }
};

/*! \brief The last `window` clocks at which one instance of a windowed rule ceases to bind. */
struct Window {
  std::vector<int64_t> until;
  size_t next = 0;
};

struct WindowedRule {
  Constraint constraint;
  std::vector<Window> instances;  // one for the channel, or one per gang or buffer
};

/*! \brief A command and all that a constraint or the issued stream may ask of it. */
struct Issue {
  Command command;
  int64_t gang = -1, buffer = -1, row = -1, column = -1, bursts = 0;
};

class StrictEngine {
 public:
  StrictEngine(const Device& device, const Constraint* rules, int64_t num_rules, int64_t* issued,
               int64_t capacity)
      : device_(device),
        gang_(device.gangs),
        buffer_(device.buffers),
        wanted_row_(device.gangs, -1),
        open_row_(device.gangs, -1),
        due_(device.nREFI),
        issued_(issued),
        issued_end_(issued + capacity * kIssuedColumns) {
    for (int64_t i = 0; i < num_rules; ++i) AddConstraint(rules[i]);
  }

  void Gwrite(int64_t buffer, int64_t, int64_t pixels, int64_t, int64_t columns) {
    CheckBuffer(buffer);
    Issue gwrite{kGWRITE};
    gwrite.buffer = buffer;
    gwrite.bursts = pixels * columns;
    const int64_t t = IssueOne(gwrite);
    tally_.gwrite_bursts += gwrite.bursts;
    busy_until_ = std::max(busy_until_, t + device_.nBL * gwrite.bursts);
  }

  void GAct(int64_t gang, int64_t row) {
    CheckIndex("gang", gang, device_.gangs);
    Issue activate{kG_ACT};
    activate.gang = gang;
    activate.row = row;
    wanted_row_[gang] = row;
    const bool everywhere = std::count(wanted_row_.begin(), wanted_row_.end(), row) == device_.gangs;
    comp_row_ = everywhere ? row : -1;
    while (open_row_[gang] >= 0) {
      Issue precharge{kPRE};
      precharge.gang = gang;
      const int64_t t = Clock(precharge);
      if (t >= due_) {
        Refresh();
      } else {
        Put(precharge, t);
        open_row_[gang] = -1;
      }
    }
    IssueOne(activate);
    open_row_[gang] = row;
  }

  void Comp(int64_t buffer, int64_t row, int64_t column, int64_t count) {
    CheckBuffer(buffer);
    if (count < 1) return;
    if (row != comp_row_) {
      if (tally_.violations == 0) tally_.first_violation = streamed_;
      tally_.violations += count;
    }
    Issue comp{kCOMP};
    comp.buffer = buffer;
    comp.row = row;
    const int64_t step = std::max<int64_t>(1, comp_to_comp_);
    while (count > 0) {
      comp.column = column;
      const int64_t t = Reopen(comp);
      // The next COMP is bound by this one alone, so a run is an arithmetic progression up to the refresh.
      const int64_t run = comp_runs_ ? std::min(count, (due_ - t + step - 1) / step) : 1;
      PutRun(comp, t, run, step);
      column += run;
      count -= run;
    }
  }

  void Readres(int64_t buffer, int64_t, int64_t) {
    CheckBuffer(buffer);
    Issue readres{kREADRES};
    readres.buffer = buffer;
    readres.bursts = device_.readres_bursts;
    const int64_t t = IssueOne(readres);
    busy_until_ = std::max(busy_until_, t + device_.nCL + device_.nBL * readres.bursts);
  }

  Tally Finish() {
    if (last_ > 0) tally_.cycles = std::max(last_ + 1, busy_until_);
    return tally_;
  }

 private:
  static bool UsesAllGangs(Command command) { return command == kCOMP || command == kREF; }

  void AddConstraint(const Constraint& constraint) {
    constexpr int64_t kComp = int64_t{1} << kCOMP;
    if (constraint.window > 1) {
      const int64_t instances = constraint.level == kChannelLevel ? 1
                                : constraint.level == kGangLevel  ? device_.gangs
                                                                  : device_.buffers;
      windowed_.push_back({constraint, std::vector<Window>(instances)});
      if (constraint.before & kComp) comp_runs_ = false;
      return;
    }
    if (constraint.before & constraint.after & kComp) {
      comp_to_comp_ = std::max(comp_to_comp_, constraint.cycles);
    }
    for (int before = 0; before < kNumCommands; ++before) {
      for (int after = 0; after < kNumCommands; ++after) {
        if (constraint.before >> before & constraint.after >> after & 1) {
          rules_[before].push_back(
              {constraint.level, after, constraint.cycles, constraint.per_burst_cycles});
        }
      }
    }
  }

  void CheckIndex(const char* what, int64_t index, int64_t size) const {
    if (index < 0 || index >= size) {
      TVM_FFI_THROW(ValueError) << "command " << streamed_ << ": " << what << " " << index << " of " << size;
    }
  }

  void CheckBuffer(int64_t buffer) const { CheckIndex("buffer", buffer, device_.buffers); }

  /*! \brief Earliest legal clock of a command. */
  int64_t Clock(const Issue& next) const {
    const Command c = next.command;
    int64_t t = std::max(last_ + 1, channel_.clock[c]);
    if (UsesAllGangs(c)) t = std::max(t, any_gang_.clock[c]);
    if (next.gang >= 0) t = std::max({t, gang_[next.gang].clock[c], every_gang_.clock[c]});
    if (next.buffer >= 0) t = std::max(t, buffer_[next.buffer].clock[c]);
    return t;
  }

  /*! \brief Issue a command of the stream, after the refreshes that come first. */
  int64_t IssueOne(const Issue& next) {
    int64_t t = Clock(next);
    for (; t >= due_; t = Clock(next)) Refresh();
    Put(next, t);
    ++streamed_;
    refreshes_in_a_row_ = 0;
    return t;
  }

  /*! \brief Open again what refreshes closed; returns the clock of `comp`, before the next refresh. */
  int64_t Reopen(const Issue& comp) {
    while (true) {
      Issue next = comp;
      for (int64_t g = 0; refreshed_ && g < device_.gangs; ++g) {
        if (open_row_[g] < 0 && wanted_row_[g] >= 0) {
          next = {kG_ACT};
          next.gang = g;
          next.row = wanted_row_[g];
          break;
        }
      }
      const int64_t t = Clock(next);
      if (t >= due_) {
        Refresh();
      } else if (next.command == kCOMP) {
        refreshed_ = false;
        return t;
      } else {
        Put(next, t);
        open_row_[next.gang] = next.row;
      }
    }
  }

  void Refresh() {
    if (++refreshes_in_a_row_ > kMaxRefreshesInARow) {
      TVM_FFI_THROW(ValueError) << "command " << streamed_
                                << ": refreshes leave no time for it; nREFI is too short for nRFC";
    }
    for (int64_t g = 0; g < device_.gangs; ++g) {
      if (open_row_[g] < 0) continue;
      Issue precharge{kPRE};
      precharge.gang = g;
      Put(precharge, std::max(Clock(precharge), due_));
      open_row_[g] = -1;
    }
    const Issue refresh{kREF};
    Put(refresh, std::max(Clock(refresh), due_));
    due_ += device_.nREFI;
    refreshed_ = true;
  }

  void Put(const Issue& issue, int64_t t) {
    Record(issue, t);
    ++tally_.commands[issue.command];
    Constrain(issue, t);
    last_ = t;
  }

  void PutRun(Issue comp, int64_t t, int64_t run, int64_t step) {
    tally_.commands[kCOMP] += run;
    if (issued_ != issued_end_) {
      for (int64_t i = 0; i < run; ++i, ++comp.column) Record(comp, t + i * step);
    }
    last_ = t + (run - 1) * step;
    Constrain(comp, last_);
    streamed_ += run;
    refreshes_in_a_row_ = 0;
  }

  void Record(const Issue& issue, int64_t t) {
    if (issued_ == issued_end_) return;
    const int64_t row[] = {t, issue.command, issue.gang, issue.buffer, issue.row, issue.column, issue.bursts};
    issued_ = std::copy(row, row + kIssuedColumns, issued_);
  }

  /*! \brief Delay what the rules say must come later than a command issued at `t`. */
  void Constrain(const Issue& issue, int64_t t) {
    const int64_t later_bursts = std::max<int64_t>(issue.bursts, 1) - 1;
    for (const Rule& rule : rules_[issue.command]) {
      Delay(rule.level, issue, rule.after, t + rule.cycles + rule.per_burst_cycles * later_bursts);
    }
    for (WindowedRule& windowed : windowed_) {
      const Constraint& rule = windowed.constraint;
      if (rule.before >> issue.command & 1) {
        Slide(&windowed, issue, t + rule.cycles + rule.per_burst_cycles * later_bursts);
      }
    }
  }

  /*! \brief Delay command `after` wherever it shares with `issue` what `level` names. */
  void Delay(int64_t level, const Issue& issue, int after, int64_t until) {
    if (level == kChannelLevel) {
      channel_.Delay(after, until);
    } else if (level == kBufferLevel) {
      if (issue.buffer >= 0) buffer_[issue.buffer].Delay(after, until);
    } else if (issue.gang >= 0) {
      gang_[issue.gang].Delay(after, until);
      any_gang_.Delay(after, until);
    } else if (UsesAllGangs(issue.command)) {
      every_gang_.Delay(after, until);
      any_gang_.Delay(after, until);
    }
  }

  void Slide(WindowedRule* windowed, const Issue& issue, int64_t until) {
    const Constraint& rule = windowed->constraint;
    for (size_t i = 0; i < windowed->instances.size(); ++i) {
      const int64_t instance = static_cast<int64_t>(i);
      Issue at = issue;
      if (rule.level == kGangLevel) {
        if (!UsesAllGangs(issue.command) && issue.gang != instance) continue;
        at.gang = instance;
      } else if (rule.level == kBufferLevel && issue.buffer != instance) {
        continue;
      }
      Window& window = windowed->instances[i];
      window.until.resize(rule.window, std::numeric_limits<int64_t>::min());
      window.until[window.next] = until;
      window.next = (window.next + 1) % rule.window;
      // The slot after the newest holds the oldest of the last `window`.
      for (int after = 0; after < kNumCommands; ++after) {
        if (rule.after >> after & 1) Delay(rule.level, at, after, window.until[window.next]);
      }
    }
  }

  Device device_;
  std::vector<Rule> rules_[kNumCommands];  // by earlier command; those of window 1
  std::vector<WindowedRule> windowed_;
  bool comp_runs_ = true;
  int64_t comp_to_comp_ = 0;

  Earliest channel_;
  std::vector<Earliest> gang_;  // what commands of that gang imposed
  Earliest every_gang_;         // what COMP and REF imposed on each gang
  Earliest any_gang_;           // the latest over all gangs
  std::vector<Earliest> buffer_;

  std::vector<int64_t> wanted_row_;  // opened last by the stream
  std::vector<int64_t> open_row_;    // -1: precharged
  int64_t comp_row_ = -1;            // wanted in every gang, if one row is
  bool refreshed_ = false;           // some wanted row may be closed

  int64_t last_ = 0;
  int64_t due_;
  int64_t busy_until_ = 0;
  int64_t streamed_ = 0;
  int refreshes_in_a_row_ = 0;
  int64_t* issued_;
  int64_t* issued_end_;
  Tally tally_;
};

/*!
 * \param device int64: the fields of Device.
 * \param rules int64 [rules, 6]: the fields of Constraint.
 * \param issued int64 [commands, 7], filled with (clock, command, gang, buffer, row, column, bursts) of
 * as many commands as it has room for; may have no rows.
 */
void TimeStrict(ffi::TensorView stream, ffi::TensorView device, ffi::TensorView rules,
                ffi::TensorView issued, ffi::TensorView tally) {
  const int64_t* d = Data<const int64_t>(device);
  StrictEngine engine({d[0], d[1], d[2], d[3], d[4], d[5], d[6]}, Data<const Constraint>(rules), rules.size(0),
                      Data<int64_t>(issued), issued.size(0));
  WalkStream(stream, d[2], &engine);
  engine.Finish().Store(tally);
}

}  // namespace

TVM_FFI_STATIC_INIT_BLOCK() {
  namespace refl = tvm::ffi::reflection;
  refl::GlobalDef().def("pimflow.simulators.time_strict", TimeStrict);
}

}  // namespace pimflow
