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

#include "timing.h"

namespace pimflow {
namespace {

namespace ffi = tvm::ffi;

constexpr int kForkGangs = 4;
constexpr int kMaxPendingRefreshes = 32;
/*! \brief GWRITE to COMP is nRC and this, READRES to GWRITE is the other: literals of the fork. */
constexpr int64_t kGwriteToCompExtra = 16;
constexpr int64_t kReadresToGwrite = 6;
/*! \brief GWRITE to GWRITE and G_ACT: column accesses of one GWRITE, 1 cycle in all when hidden. */
constexpr int64_t kGwriteColumns = 32;

/*! \brief Cycles, in the order Python passes them. */
struct Latencies {
  int64_t nBL, nCCDS, nCL, nRCDR, nRP, nRC, nFAW, nRFC, nREFI;
};

class RamulatorEngine {
 public:
  RamulatorEngine(const Latencies& n, bool gwrite_hiding, int64_t readres_bursts)
      : n_(n), gwrite_gap_(gwrite_hiding ? 1 : kGwriteColumns * n.nCCDS), readres_bursts_(readres_bursts) {}

  void Gwrite(int64_t, int64_t, int64_t pixels, int64_t, int64_t columns) {
    const int64_t t = Issue(kGWRITE, gwrite_, 1, 1);
    tally_.gwrite_bursts += pixels * columns;
    gwrite_ = std::max(gwrite_, t + gwrite_gap_);
    for (int64_t& earliest : g_act_) earliest = std::max(earliest, t + gwrite_gap_);
    comp_ = std::max(comp_, t + n_.nRC + kGwriteToCompExtra);
  }

  void GAct(int64_t gang, int64_t) {
    if (gang < 0 || gang >= kForkGangs) {
      TVM_FFI_THROW(ValueError) << "command " << parsed_ << ": gang " << gang << " of " << kForkGangs;
    }
    const int64_t t = Issue(kG_ACT, g_act_[gang], 1, 1);
    if (gang + 1 < kForkGangs) g_act_[gang + 1] = std::max(g_act_[gang + 1], t + n_.nFAW);
    comp_ = std::max(comp_, t + n_.nRCDR);
    row_open_ = true;
  }

  void Comp(int64_t, int64_t, int64_t, int64_t count) {
    if (count < 1) return;
    const int64_t t = Issue(kCOMP, comp_, count, std::max<int64_t>(1, n_.nCCDS));
    comp_ = std::max(comp_, t + n_.nCCDS);
    readres_ = std::max(readres_, t + 1);
  }

  void Readres(int64_t, int64_t, int64_t) {
    const int64_t t = Issue(kREADRES, readres_, 1, 1);
    gwrite_ = std::max(gwrite_, t + kReadresToGwrite);
    departed_ = t + n_.nCL + n_.nBL * readres_bursts_;
    after_readres_ = true;
  }

  /*! \brief First tick at or after the last issue, past all data, with no refresh pending. */
  Tally Finish() {
    if (parsed_ == 0) {
      tally_.cycles = 1;
      return tally_;
    }
    const int64_t done = std::max({last_, parsed_ + 1, departed_});
    int64_t t = last_;
    while (t < done || Pending(t) > 0) {
      ++t;
      if (Pending(t) <= 0) {
        t = std::max(t, std::min(done, (served_ + 1) * n_.nREFI) - 1);
        continue;
      }
      CheckPending(t, parsed_ - 1);
      if (row_open_) {
        Precharge(t);
      } else if (t >= ref_) {
        Refresh(t);
      }
    }
    tally_.cycles = t;
    return tally_;
  }

 private:
  int64_t Pending(int64_t t) const { return t / n_.nREFI - served_; }

  void CheckPending(int64_t t, int64_t command) const {
    if (Pending(t) > kMaxPendingRefreshes) {
      TVM_FFI_THROW(ValueError) << "command " << command << ": more than " << kMaxPendingRefreshes
                                << " refreshes are pending; no READRES lets them through";
    }
  }

  /*! \brief Issue `count` equal commands, the first no sooner than `earliest` (a refresh served first may
   * raise it); the last one's clock. */
  int64_t Issue(Command command, const int64_t& earliest, int64_t count, int64_t step) {
    int64_t t = last_ + 1;
    if (after_readres_) t = ServePending(t);
    after_readres_ = false;
    t = std::max(t, earliest);
    last_ = t + step * (count - 1);
    if (Pending(last_) > kMaxPendingRefreshes) {
      const int64_t overflow = (served_ + kMaxPendingRefreshes + 1) * n_.nREFI;
      CheckPending(last_, parsed_ + std::max<int64_t>(0, (overflow - t + step - 1) / step));
    }
    parsed_ += count;
    tally_.commands[command] += count;
    return last_;
  }

  /*! \brief First tick from `t` on with nothing pending. */
  int64_t ServePending(int64_t t) {
    while (Pending(t) > 0) {
      CheckPending(t, parsed_);
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
    ++tally_.commands[kPRE];
  }

  void Refresh(int64_t t) {
    g_act_[0] = std::max(g_act_[0], t + n_.nRFC);
    ref_ = std::max(ref_, t + n_.nRFC);
    ++served_;
    ++tally_.commands[kREF];
  }

  Latencies n_;
  int64_t gwrite_gap_;
  int64_t readres_bursts_;
  Tally tally_;
  // Clock of the last command of the stream, and earliest clocks of the next ones.
  int64_t last_ = 0;
  int64_t gwrite_ = 0, g_act_[kForkGangs] = {}, comp_ = 0, readres_ = 0, ref_ = 0;
  int64_t departed_ = 0;
  int64_t parsed_ = 0;
  int64_t served_ = 0;
  bool row_open_ = false;
  bool after_readres_ = false;
};

/*!
 * \param latencies int64: the fields of Latencies, then GWRITE latency hiding (0 or 1), bursts of a
 * READRES, columns of a GWRITE line.
 */
void TimeRamulator(ffi::TensorView stream, ffi::TensorView latencies, ffi::TensorView tally) {
  const int64_t* n = Data<const int64_t>(latencies);
  RamulatorEngine engine({n[0], n[1], n[2], n[3], n[4], n[5], n[6], n[7], n[8]}, n[9] != 0, n[10]);
  WalkStream(stream, n[11], &engine);
  engine.Finish().Store(tally);
}

}  // namespace

TVM_FFI_STATIC_INIT_BLOCK() {
  namespace refl = tvm::ffi::reflection;
  refl::GlobalDef().def("pimflow.simulators.time_ramulator", TimeRamulator);
}

}  // namespace pimflow
