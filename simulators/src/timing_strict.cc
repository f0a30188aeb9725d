/*!
 * \brief The `strict` timing: in-order issue under a table of constraints, with refresh.
 *
 * At most one command issues in a clock, the first at clock 1, each at the earliest clock that its constraints
 * allow. The engine adds the commands of the memory controller:
 *
 *  - A G_ACT to a gang that has a row open is preceded by a PRE of that gang, also for the same row.
 *  - At every clock k*nREFI one refresh falls due; the first `refreshes_ahead` of them were served before.
 *    A command that cannot issue before the earliest unserved one is due waits for it: PRE of each open gang in
 *    order, then REF, all at or after the due clock.
 *  - A COMP or AF is preceded by a G_ACT, in gang order, of each gang that a refresh closed since the stream
 *    opened it; a WRITE by a G_ACT of its gang. Gangs that the stream itself opens before its next COMP are not
 *    reopened.
 *
 * A device may have one host for all channels (`Host`). Its channels run in lockstep: each instruction goes to all
 * of them, except GWRITE and WRBIAS, for which every group of channels with its own values gets separate
 * instructions. These are pieces that fit into a channel's queue, for each group in turn, so that groups are
 * written in parallel. The engine models a channel of the group that is served last; the pixel of a GWRITE or
 * WRBIAS is then the number of groups before it.
 *
 * cycles = max(last issue + 1, READRES + nCL + nBL*bursts, GWRITE + nBL*bursts, WRITE + nBL*bursts,
 * WRBIAS + nBL*bursts) over all of these; 0 for an empty stream. Refreshes that fall due after the last issue
 * are not served.
 */
#include <tvm/ffi/tvm_ffi.h>

#include <algorithm>
#include <vector>

#include "constraint_clocks.h"
#include "feed.h"

namespace pimflow {
namespace {

namespace ffi = tvm::ffi;

/*! \brief Consecutive refreshes after which the stream is considered starved. */
constexpr int kMaxConsecutiveRefreshes = 1024;
/*! \brief Largest number of clocks by which the host may be ahead of the channels in the state. */
constexpr int64_t kHostMemory = 1024;

/*!
 * \brief `lanes`: elements of a vector, and banks of a WRITE, in one burst; `vector_bursts`: bursts for the elements
 * of a vector that a column is multiplied with (PimProgram);
 * `refreshes_ahead`: refreshes that were served before clock 1 (PimSpec).
 */
PIMFLOW_RECORD(StrictDevice, int64_t, gangs, buffers, readres_bursts, lanes, vector_bursts, nCL, nBL, nREFI, refreshes_ahead);

/*!
 * \brief The host that issues the instructions of all channels, one after the other; all zero without a host.
 *
 * It continues `after_result` cycles after a READRES, and `next` cycles after another instruction. But a channel's
 * queue takes only `queue` bursts or columns at once, and the host continues when the rest fits in. An instruction
 * takes a channel `turnaround` cycles more if it has to change between its banks and the bus.
 */
PIMFLOW_RECORD(Host, int64_t, after_result, next, per_burst, queue, turnaround);

/*! \brief A command that was issued; -1 where it has no such operand. */
PIMFLOW_RECORD(IssuedCommand, int64_t, clock, command, gang, buffer, row, column, bursts);

class StrictEngine {
 public:
  StrictEngine(const StrictDevice& device, const Host& host, const RecordTable<Constraint>& rules)
      : device_(device),
        host_(host),
        table_(device.gangs, device.buffers, rules),
        stream_row_(device.gangs, -1),
        is_open_(device.gangs, 0),
        due_((1 + device.refreshes_ahead) * device.nREFI) {}

  void SetRecord(const RecordTable<IssuedCommand>& issued) { issued_ = issued.begin(), issued_end_ = issued.end(); }

  void Gwrite(int64_t buffer, int64_t groups_before, int64_t pixels, int64_t, int64_t columns) {
    Issue gwrite{kGWRITE};
    gwrite.buffer = buffer;
    gwrite.bursts = Bursts(pixels * columns * device_.vector_bursts);
    IssueGroupWrite(gwrite, groups_before);
    totals_.gwrite_bursts += gwrite.bursts;
  }

  void Wrbias(int64_t latch, int64_t groups_before, int64_t, bool) {
    Issue wrbias{kWRBIAS};
    wrbias.buffer = latch % device_.buffers;
    wrbias.latch = latch;
    wrbias.bursts = device_.readres_bursts;
    IssueGroupWrite(wrbias, groups_before);
  }

  void GAct(int64_t gang, int64_t row) {
    Issue activate{kG_ACT};
    activate.gang = gang;
    activate.row = row;
    stream_row_[gang] = row;
    while (is_open_[gang]) {
      Issue precharge{kPRE};
      precharge.gang = gang;
      const int64_t t = Clock(precharge);
      if (t >= due_) {
        Refresh();
      } else {
        Put(precharge, t);
        is_open_[gang] = 0;
      }
    }
    IssueCommand(activate);
    is_open_[gang] = 1;
  }

  void Comp(int64_t buffer, int64_t row, int64_t column, int64_t count) {
    Issue comp{kCOMP};
    comp.buffer = buffer % device_.buffers;
    comp.latch = buffer;
    comp.row = row;
    const int64_t step = table_.comp_step();
    while (count > 0) {
      comp.column = column;
      const int64_t t = Reopen(comp);
      if (host_.next > 0) {
        host_free_ = std::max(host_free_, t + std::max<int64_t>(0, count - host_.queue) * step + host_.next);
      }
      // Only the previous COMP constrains the next one, so a run has a constant step up to the refresh.
      int64_t run = 1;
      if (step > 0 && count > 1) {
        run = t + (count - 1) * step < due_ ? count : (due_ - t + step - 1) / step;
      }
      PutRun(comp, t, run, step);
      column += run;
      count -= run;
    }
  }

  void Af(int64_t latch, int64_t row) {
    Issue af{kAF};
    af.buffer = latch % device_.buffers;
    af.latch = latch;
    af.row = row;
    const int64_t t = Reopen(af);
    if (host_.next > 0) host_free_ = std::max(host_free_, t + host_.next);
    Put(af, t);
    ++totals_.streamed;
    consecutive_refreshes_ = 0;
  }

  void Readres(int64_t buffer, int64_t, int64_t) {
    Issue readres{kREADRES};
    readres.buffer = buffer % device_.buffers;
    readres.latch = buffer;
    readres.bursts = device_.readres_bursts;
    const int64_t t = IssueCommand(readres);
    if (host_.next > 0) {
      host_free_ = t + host_.after_result;
      lead_ = 0;
    }
    busy_until_ = std::max(busy_until_, t + device_.nCL + device_.nBL * readres.bursts);
  }

  void Write(const WriteOperands& operands) {
    Issue write{kWRITE};
    write.gang = operands.gang;
    write.row = operands.row;
    write.column = operands.column;
    write.bursts = Bursts(operands.banks) * operands.count;
    const int64_t t = Reopen(write);
    Put(write, t);
    ++totals_.streamed;
    consecutive_refreshes_ = 0;
    totals_.write_bursts += write.bursts;
    busy_until_ = std::max(busy_until_, t + device_.nBL * write.bursts);
  }

  /*! \brief The cycles, if the stream ends here. */
  int64_t Finish() const { return last_ > 0 ? std::max(last_ + 1, busy_until_) : 0; }

  int64_t clock() const { return last_; }
  int64_t deadline() const { return due_; }
  int64_t refreshes() const { return totals_.commands[kREF]; }
  Totals& totals() { return totals_; }

  size_t StateWords() const { return table_.clocks().size() + 5 + 2 * device_.gangs; }

  /*! \brief See PeriodWalk. Clocks depend on whether a gang has a row, not on which row. */
  void State(int64_t* words) const {
    for (int64_t clock : table_.clocks()) *words++ = std::max<int64_t>(0, clock - last_);
    *words++ = std::max<int64_t>(0, busy_until_ - last_);
    *words++ = host_.next > 0 ? HostFree() - last_ : 0;
    *words++ = lead_;
    *words++ = has_refreshed_;
    *words++ = is_computing_;
    for (int64_t g = 0; g < device_.gangs; ++g) {
      *words++ = stream_row_[g] >= 0;
      *words++ = is_open_[g];
    }
  }

  void Restore(const int64_t* words, int64_t clock, int64_t deadline) {
    for (int64_t& clock_value : table_.clocks()) clock_value = clock + *words++;
    busy_until_ = clock + *words++;
    host_free_ = clock + *words++;
    lead_ = *words++;
    has_refreshed_ = *words++ != 0;
    is_computing_ = *words++ != 0;
    for (int64_t g = 0; g < device_.gangs; ++g) {
      stream_row_[g] = *words++ - 1;
      is_open_[g] = *words++;
    }
    last_ = clock;
    due_ = deadline;
  }

  void Shift(int64_t cycles) {
    for (int64_t& clock : table_.clocks()) clock += cycles;
    busy_until_ += cycles;
    host_free_ += cycles;
    last_ += cycles;
  }

 private:
  int64_t Bursts(int64_t columns) const { return (columns + device_.lanes - 1) / device_.lanes; }

  /*! \brief Whether the host issues a command separately for each group of channels. */
  static bool IsIssuedPerGroup(int command) { return command == kGWRITE || command == kWRBIAS; }

  /*! \brief Issue a write over the bus, after those of `groups_before` groups of channels. */
  void IssueGroupWrite(const Issue& write, int64_t groups_before) {
    const int64_t t = IssueCommand(write, host_.next > 0 ? groups_before : 0);
    if (host_.next > 0) {
      host_free_ = group_write_.host_free;
      lead_ = group_write_.lead;
    }
    busy_until_ = std::max(busy_until_, t + device_.nBL * write.bursts);
  }

  int64_t Clock(const Issue& next) const { return std::max(last_ + 1, table_.Earliest(next)); }

  /*! \brief When the host can issue the next instruction; it is limited to the last kHostMemory clocks. */
  int64_t HostFree() const { return std::max(host_free_, last_ - kHostMemory); }

  /*! \brief Clock of a write in the group served last, next clock of the host, and lead of the first group. */
  struct GroupWriteClocks {
    int64_t clock, host_free, lead;
  };

  /*! \brief Clocks of a write that the host issues to each group in turn. */
  GroupWriteClocks ComputeGroupWrite(const Issue& next, int64_t groups_before) const {
    const int64_t ready = Clock(next), turnaround = is_computing_ ? host_.turnaround : 0;
    const int64_t blocked = std::max<int64_t>(0, next.bursts - host_.queue) * host_.per_burst;
    const int64_t arrives = HostFree(), arrives_last = arrives + groups_before * host_.next;
    const int64_t first = std::max(ready - (groups_before > 0 ? lead_ : 0), arrives + turnaround);
    const int64_t last = std::max(ready, arrives_last + turnaround);
    return {last, std::max(arrives_last + host_.next, blocked > 0 ? last + blocked : 0), last - first};
  }

  int64_t IssueClock(const Issue& next, int64_t groups_before) {
    if (host_.next == 0 || !IsIssuedPerGroup(next.command)) return Clock(next);
    group_write_ = ComputeGroupWrite(next, groups_before);
    return group_write_.clock;
  }

  /*! \brief Issue a command of the stream, after the refreshes that are due before it. */
  int64_t IssueCommand(const Issue& next, int64_t groups_before = 0) {
    int64_t t = IssueClock(next, groups_before);
    for (; t >= due_; t = IssueClock(next, groups_before)) Refresh();
    Put(next, t);
    ++totals_.streamed;
    consecutive_refreshes_ = 0;
    return t;
  }

  /*! \brief Reopen rows of `access` that refreshes closed; returns its clock, which is before the next refresh. */
  int64_t Reopen(const Issue& access) {
    const bool uses_all_gangs = access.command == kCOMP || access.command == kAF;
    const int64_t begin = uses_all_gangs ? 0 : access.gang, end = uses_all_gangs ? device_.gangs : access.gang + 1;
    while (true) {
      Issue next = access;
      for (int64_t g = begin; has_refreshed_ && g < end; ++g) {
        if (!is_open_[g] && stream_row_[g] >= 0) {
          next = {kG_ACT};
          next.gang = g;
          next.row = stream_row_[g];
          break;
        }
      }
      const int64_t t = Clock(next);
      if (t >= due_) {
        Refresh();
      } else if (next.command == access.command) {
        if (uses_all_gangs) has_refreshed_ = false;
        return t;
      } else {
        Put(next, t);
        is_open_[next.gang] = 1;
      }
    }
  }

  void Refresh() {
    if (++consecutive_refreshes_ > kMaxConsecutiveRefreshes) {
      PIMFLOW_THROW_AT(totals_.streamed) << "refreshes leave no time for it; nREFI is too short for nRFC";
    }
    for (int64_t g = 0; g < device_.gangs; ++g) {
      if (!is_open_[g]) continue;
      Issue precharge{kPRE};
      precharge.gang = g;
      Put(precharge, std::max(Clock(precharge), due_));
      is_open_[g] = 0;
    }
    const Issue refresh{kREF};
    Put(refresh, std::max(Clock(refresh), due_));
    due_ += device_.nREFI;
    has_refreshed_ = true;
  }

  void Put(const Issue& issue, int64_t t) {
    Record(issue, t);
    ++totals_.commands[issue.command];
    table_.Constrain(issue, t);
    NoteBankCommand(!IsIssuedPerGroup(issue.command) && issue.command != kREADRES, t);
    last_ = t;
  }

  void PutRun(Issue comp, int64_t t, int64_t run, int64_t step) {
    totals_.commands[kCOMP] += run;
    if (issued_ != issued_end_) {
      for (int64_t i = 0; i < run; ++i, ++comp.column) Record(comp, t + i * step);
    }
    NoteBankCommand(true, t);
    last_ = t + (run - 1) * step;
    table_.Constrain(comp, last_);
    totals_.streamed += run;
    consecutive_refreshes_ = 0;
  }

  /*! \brief Note whether the command at `t` is one of the banks; the first after the bus also waits for the host. */
  void NoteBankCommand(bool is_computing, int64_t t) {
    if (is_computing && !is_computing_) lead_ = std::clamp<int64_t>(t - HostFree() - host_.turnaround, 0, lead_);
    is_computing_ = is_computing;
  }

  void Record(const Issue& issue, int64_t t) {
    if (issued_ == issued_end_) return;
    const int64_t buffer = issue.latch >= 0 ? issue.latch : issue.buffer;
    *issued_++ = {t, issue.command, issue.gang, buffer, issue.row, issue.column, issue.bursts};
  }

  StrictDevice device_;
  Host host_;
  ConstraintClocks table_;
  std::vector<int64_t> stream_row_;  // opened last by the stream
  std::vector<int64_t> is_open_;
  bool has_refreshed_ = false;  // a refresh may have closed rows of the stream

  int64_t last_ = 0;
  int64_t due_;
  int64_t busy_until_ = 0;
  int64_t host_free_ = 1;  // when the host can issue the next instruction
  GroupWriteClocks group_write_{};
  int64_t lead_ = 0;       // clocks of the group served first ahead of that served last
  bool is_computing_ = true;       // the previous command was not one of the bus
  int consecutive_refreshes_ = 0;  // 0 between commands of the stream
  IssuedCommand *issued_ = nullptr, *issued_end_ = nullptr;
  Totals totals_;
};

StrictEngine MakeEngine(const ffi::TensorView& device, const ffi::TensorView& host, const ffi::TensorView& rules) {
  return {ReadRecord<StrictDevice>(device), ReadRecord<Host>(host), RecordTable<Constraint>(rules)};
}

/*! \brief The engine of one channel; see MakeFeeder. `rules` has a `Constraint` in each row. */
ffi::Function TimeStrict(ffi::TensorView organisation, ffi::TensorView device, ffi::TensorView host,
                         ffi::TensorView rules) {
  return MakeFeeder(MakeEngine(device, host, rules), ReadRecord<Organisation>(organisation));
}

/*! \brief Fill `issued` with the first commands that the engine issues for a program, an `IssuedCommand` each. */
void IssueStrict(ffi::TensorView stream, ffi::TensorView device, ffi::TensorView host, ffi::TensorView rules,
                 ffi::TensorView issued) {
  StrictEngine engine = MakeEngine(device, host, rules);
  engine.SetRecord(RecordTable<IssuedCommand>(issued));
  Walk(Stream(stream), stream.numel(), &engine);
}

}  // namespace

TVM_FFI_STATIC_INIT_BLOCK() {
  namespace refl = tvm::ffi::reflection;
  DefineRecord<Organisation>("pimflow.simulators.organisation");
  DefineRecord<StrictDevice>("pimflow.simulators.strict_device");
  DefineRecord<Host>("pimflow.simulators.host");
  DefineRecord<Constraint>("pimflow.simulators.constraint");
  DefineRecord<Tally>("pimflow.simulators.tally");
  DefineRecord<IssuedCommand>("pimflow.simulators.issued_command");
  refl::GlobalDef()
      .def("pimflow.simulators.time_strict", TimeStrict)
      .def("pimflow.simulators.issue_strict", IssueStrict);
}

}  // namespace pimflow
