/*!
 * \brief Wraps a timing engine in a function that takes a channel's stream piece by piece.
 */
#ifndef PIMFLOW_SIMULATORS_FEED_H_
#define PIMFLOW_SIMULATORS_FEED_H_

#include <algorithm>
#include <memory>
#include <utility>

#include "periods.h"
#include "stream_check.h"
#include "timing.h"

namespace pimflow {

/*! \brief Whether a stream is a trace, with words of 32 bits; encoded programs (program.h) have 64. */
inline bool IsTrace(const tvm::ffi::TensorView& stream) { return stream.dtype().bits == 32; }

/*! \brief What a channel's streams come to; commands by name. `last_issue` is the clock of the last command. */
PIMFLOW_RECORD(Tally, int64_t, cycles, GWRITE, G_ACT, COMP, READRES, PRE, REF, WRITE, WRBIAS, AF, gwrite_bursts,
               write_bursts, violations, first_violation, empty_reads, used_columns, last_issue);

/*!
 * \brief A function of a stream and a `Tally`: it continues with the stream after those of earlier calls, and fills
 *   the tally of all of them.
 */
template <typename Engine>
tvm::ffi::Function MakeFeeder(Engine engine, const Organisation& organisation) {
  using tvm::ffi::TensorView;
  struct Channel {
    Engine engine;
    StreamCheck check;
  };
  auto channel = std::make_shared<Channel>(Channel{std::move(engine), StreamCheck(organisation)});
  const int64_t gwrite_columns = organisation.gwrite_columns;
  return tvm::ffi::Function::FromTyped([channel, gwrite_columns](TensorView stream, TensorView tally) {
    Tally& result = ReadRecord<Tally>(tally);
    // The check comes first: the engines rely on operands being in range.
    if (IsTrace(stream)) {
      const uint32_t* words = Data<const uint32_t>(stream);
      WalkTrace(words, stream.numel(), gwrite_columns, &channel->check);
      WalkTrace(words, stream.numel(), gwrite_columns, &channel->engine);
    } else {
      const int64_t* words = Stream(stream);
      channel->check.Run(words, stream.numel());
      PeriodWalk<Engine>(&channel->engine).Run(words, stream.numel());
    }
    Engine ended = channel->engine;
    const int64_t cycles = ended.Finish();
    const Totals& totals = ended.totals();
    const StreamCheck::Counts& counts = channel->check.counts();
    const auto count = [&](Command command) { return totals.commands[command]; };
    result = {cycles,
              count(kGWRITE),
              count(kG_ACT),
              count(kCOMP),
              count(kREADRES),
              count(kPRE),
              count(kREF),
              count(kWRITE),
              count(kWRBIAS),
              count(kAF),
              totals.gwrite_bursts,
              totals.write_bursts,
              counts.violations,
              channel->check.first_violation(),
              counts.empty_reads,
              counts.used_columns,
              ended.clock()};
  });
}

}  // namespace pimflow

#endif  // PIMFLOW_SIMULATORS_FEED_H_
