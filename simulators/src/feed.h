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

/*!
 * \brief A function of a stream and a tally: it continues with the stream after those of earlier calls, and fills
 * the tally of all of them (int64: cycles, commands by id, bursts of GWRITEs and of WRITEs, violations, index
 * of the first violation, empty reads, used columns, clock of the last issue).
 *
 * \param gwrite_columns Columns that a GWRITE of a trace writes.
 */
template <typename Engine>
tvm::ffi::Function MakeFeeder(Engine engine, const Organisation& organisation, int64_t gwrite_columns) {
  using tvm::ffi::TensorView;
  struct Channel {
    Engine engine;
    StreamCheck check;
  };
  auto channel = std::make_shared<Channel>(Channel{std::move(engine), StreamCheck(organisation)});
  return tvm::ffi::Function::FromTyped([channel, gwrite_columns](TensorView stream, TensorView tally) {
    int64_t* word = Data<int64_t>(tally, kNumCommands + 8);
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
    *word++ = ended.Finish();
    const Totals& totals = ended.totals();
    const StreamCheck::Counts& counts = channel->check.counts();
    word = std::copy(totals.commands, totals.commands + kNumCommands, word);
    for (int64_t value : {totals.gwrite_bursts, totals.write_bursts, counts.violations, channel->check.first_violation(),
                          counts.empty_reads, counts.used_columns, ended.clock()}) {
      *word++ = value;
    }
  });
}

}  // namespace pimflow

#endif  // PIMFLOW_SIMULATORS_FEED_H_
