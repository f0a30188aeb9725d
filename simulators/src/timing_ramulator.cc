/*!
 * \brief Timing of the PIM path of the PIMFlow authors' Ramulator fork, cycle for cycle.
 *
 * In order, at most one command a clock, constraints at rank level. A REF falls due at every multiple
 * of nREFI, and is served only after a READRES or once the stream has drained; while one is served no
 * other command issues. The only bank state is "some row is open". What is physically wrong with this
 * is deliberate here; timing_strict.cc is the model that is not.
 */
#include <tvm/ffi/tvm_ffi.h>

#include <algorithm>
#include <array>

#include "feed.h"

namespace pimflow {
namespace {

namespace ffi = tvm::ffi;

constexpr int kForkGangs = 4;
constexpr int kForkClocks = kForkGangs + 5;
constexpr int kMaxPendingRefreshes = 32;
/*! \brief Constants of the fork: GWRITE to COMP is nRC plus the first, READRES to GWRITE the second. */
constexpr int64_t kGwriteToCompExtra = 16;
constexpr int64_t kReadresToGwrite = 6;
/*! \brief Column accesses between a GWRITE and the next GWRITE or G_ACT; 1 cycle in all if hidden. */
constexpr int64_t kGwriteColumns = 32;

/*! \brief Cycles, in the order Python passes them. */
struct Latencies {
  int64_t nBL, nCCDS, nCL, nRCDR, nRP, nRC, nFAW, nRFC, nREFI;
};

class RamulatorEngine {
  /*! \brief Pointers to all clocks but that of the last issue, of a const or mutable engine. */
  template <typename Self>
  static auto Clocks(Self& self) {
    return std::array{&self.gwrite_, &self.g_act_[0], &self.g_act_[1], &self.g_act_[2], &self.g_act_[3],
                      &self.comp_,   &self.readres_,  &self.ref_,      &self.departed_};
  }

 public:
  RamulatorEngine(const Latencies& n, bool gwrite_hiding, int64_t readres_bursts)
      : n_(n), gwrite_gap_(gwrite_hiding ? 1 : kGwriteColumns * n.nCCDS), readres_bursts_(readres_bursts) {}

  void Gwrite(int64_t, int64_t, int64_t pixels, int64_t, int64_t columns) {
    const int64_t t = Issue(kGWRITE, gwrite_, 1, 1);
    totals_.gwrite_bursts += pixels * columns;
    gwrite_ = std::max(gwrite_, t + gwrite_gap_);
    for (int64_t& earliest : g_act_) earliest = std::max(earliest, t + gwrite_gap_);
    comp_ = std::max(comp_, t + n_.nRC + kGwriteToCompExtra);
  }

  void GAct(int64_t gang, int64_t) {
    const int64_t t = Issue(kG_ACT, g_act_[gang], 1, 1);
    if (gang + 1 < kForkGangs) g_act_[gang + 1] = std::max(g_act_[gang + 1], t + n_.nFAW);
    comp_ = std::max(comp_, t + n_.nRCDR);
    row_open_ = true;
  }

  void Comp(int64_t, int64_t, int64_t, int64_t count) {
    const int64_t t = Issue(kCOMP, comp_, count, std::max<int64_t>(1, n_.nCCDS));
    comp_ = std::max(comp_, t + n_.nCCDS);
    readres_ = std::max(readres_, t + 1);
  }

  void Wrbias(int64_t, int64_t, int64_t, bool) {
    PIMFLOW_THROW_AT(totals_.streamed) << "the published timing has no WRBIAS";
  }

  void Af(int64_t, int64_t) { PIMFLOW_THROW_AT(totals_.streamed) << "the published timing has no AF"; }

  void Readres(int64_t, int64_t, int64_t) {
    const int64_t t = Issue(kREADRES, readres_, 1, 1);
    gwrite_ = std::max(gwrite_, t + kReadresToGwrite);
    departed_ = t + n_.nCL + n_.nBL * readres_bursts_;
    after_readres_ = true;
  }

  void Write(const WriteOperands&) {
    PIMFLOW_THROW_AT(totals_.streamed) << "the PIMFlow authors' Ramulator fork has no WRITE; use --timing strict";
  }

  /*! \brief First tick after the last issue and all data at which no refresh is pending. */
  int64_t Finish() {
    const int64_t parsed = totals_.streamed;
    if (parsed == 0) return 1;
    const int64_t done = std::max({last_, parsed + 1, departed_});
    int64_t t = last_;
    while (t < done || PendingRefreshes(t) > 0) {
      ++t;
      if (PendingRefreshes(t) <= 0) {
        t = std::max(t, std::min(done, deadline()) - 1);
        continue;
      }
      CheckPending(t, parsed - 1);
      if (row_open_) {
        Precharge(t);
      } else if (t >= ref_) {
        Refresh(t);
      }
    }
    return t;
  }

  int64_t clock() const { return last_; }
  int64_t deadline() const { return (refreshes() + 1) * n_.nREFI; }
  int64_t refreshes() const { return totals_.commands[kREF]; }
  Totals& totals() { return totals_; }

  static constexpr size_t StateWords() { return kForkClocks + 2; }

  /*! \brief See PeriodWalk. */
  void State(int64_t* words) const {
    for (const int64_t* clock : Clocks(*this)) *words++ = std::max<int64_t>(0, *clock - last_);
    *words++ = row_open_;
    *words++ = after_readres_;
  }

  /*! \brief See PeriodWalk. The deadline follows from the number of refreshes. */
  void Restore(const int64_t* words, int64_t clock, int64_t) {
    for (int64_t* clock_value : Clocks(*this)) *clock_value = clock + *words++;
    row_open_ = *words++ != 0;
    after_readres_ = *words != 0;
    last_ = clock;
  }

  void Shift(int64_t cycles) {
    for (int64_t* clock : Clocks(*this)) *clock += cycles;
    last_ += cycles;
  }

 private:
  int64_t PendingRefreshes(int64_t t) const { return t / n_.nREFI - refreshes(); }

  void CheckPending(int64_t t, int64_t command) const {
    if (PendingRefreshes(t) > kMaxPendingRefreshes) {
      PIMFLOW_THROW_AT(command) << "more than " << kMaxPendingRefreshes
                                << " refreshes are pending; no READRES lets them through";
    }
  }

  /*! \brief Issue `count` equal commands, the first no sooner than `earliest`, which a refresh before it may
   * raise; returns the clock of the last one. */
  int64_t Issue(Command command, const int64_t& earliest, int64_t count, int64_t step) {
    int64_t t = last_ + 1;
    if (after_readres_) t = ServePending(t);
    after_readres_ = false;
    t = std::max(t, earliest);
    last_ = t + step * (count - 1);
    if (last_ >= deadline() && PendingRefreshes(last_) > kMaxPendingRefreshes) {
      const int64_t overflow = (refreshes() + kMaxPendingRefreshes + 1) * n_.nREFI;
      CheckPending(last_, totals_.streamed + std::max<int64_t>(0, (overflow - t + step - 1) / step));
    }
    totals_.streamed += count;
    totals_.commands[command] += count;
    return last_;
  }

  /*! \brief Serve refreshes; returns the first tick from `t` on at which none is pending. */
  int64_t ServePending(int64_t t) {
    while (PendingRefreshes(t) > 0) {
      CheckPending(t, totals_.streamed);
      if (row_open_) Precharge(t++);
      t = std::max(t, ref_);
      Refresh(t++);
    }
    return t;
  }

  void Precharge(int64_t t) {
    g_act_[0] = std::max(g_act_[0], t + n_.nRP);
    ref_ = std::max(ref_, t + n_.nRP);
    row_open_ = false;
    ++totals_.commands[kPRE];
  }

  void Refresh(int64_t t) {
    g_act_[0] = std::max(g_act_[0], t + n_.nRFC);
    ref_ = std::max(ref_, t + n_.nRFC);
    ++totals_.commands[kREF];
  }

  Latencies n_;
  int64_t gwrite_gap_;
  int64_t readres_bursts_;
  Totals totals_;  // its REFs are the refreshes served
  // Clock of the last command of the stream, and earliest clock of each next command.
  int64_t last_ = 0;
  int64_t gwrite_ = 0, g_act_[kForkGangs] = {}, comp_ = 0, readres_ = 0, ref_ = 0;
  int64_t departed_ = 0;
  bool row_open_ = false;
  bool after_readres_ = false;
};

/*!
 * \brief The engine of one channel; see Feeder.
 * \param organisation int64: the fields of Organisation, then columns of a trace's GWRITE.
 * \param latencies int64: the fields of Latencies, then GWRITE latency hiding (0 or 1), bursts of a
 * READRES.
 */
ffi::Function TimeRamulator(ffi::TensorView organisation, ffi::TensorView latencies) {
  const int64_t *o = Data<const int64_t>(organisation, 6), *n = Data<const int64_t>(latencies, 11);
  const RamulatorEngine engine({n[0], n[1], n[2], n[3], n[4], n[5], n[6], n[7], n[8]}, n[9] != 0, n[10]);
  return MakeFeeder(engine, {o[0], o[1], o[2], o[3], o[4]}, o[5]);
}

}  // namespace

TVM_FFI_STATIC_INIT_BLOCK() {
  namespace refl = tvm::ffi::reflection;
  refl::GlobalDef().def("pimflow.simulators.time_ramulator", TimeRamulator);
}

}  // namespace pimflow
