/*!
 * \file solve.cc
 * \brief The search for a plan below a capacity, as a function of tvm-ffi.
 */
#include <tvm/ffi/container/map.h>
#include <tvm/ffi/extra/c_env_api.h>
#include <tvm/ffi/tvm_ffi.h>

#include <algorithm>
#include <chrono>

#include "../../host/src/records.h"
#include "canonical_search.h"

namespace pimflow {
namespace {

namespace ffi = tvm::ffi;

/*! \brief A buffer: the sections [first, last) in which it is live, its steps, bytes, and required offset, or -1. */
PIMFLOW_RECORD(BufferRow, int64_t, first, last, width, size, alignment, fixed);

/*!
 * \brief Search for a plan of at most `capacity` bytes.
 * \param rows `BufferRow`, one each.
 * \param offsets int64 [buffers], written if a plan is found.
 * \return The outcome (0 feasible, 1 infeasible, 2 stopped) and the nodes searched.
 */
ffi::Map<ffi::String, int64_t> SearchOffsets(ffi::TensorView rows, ffi::TensorView offsets, int64_t sections, int64_t capacity,
                                      int64_t node_limit, double seconds) {
  const RecordTable<BufferRow> table(rows);
  if (table.size() != offsets.numel()) {
    TVM_FFI_THROW(ValueError) << offsets.numel() << " offsets for " << table.size() << " buffers";
  }
  memory::Problem problem;
  problem.sections = sections;
  for (const BufferRow& row : table) {
    problem.buffers.push_back({row.first, row.last, row.width, row.size, 0, row.alignment, row.fixed, 0});
  }
  problem.Prepare();
  using Clock = memory::CanonicalSearch::Clock;
  const auto span = std::chrono::duration_cast<Clock::duration>(std::chrono::duration<double>(seconds));
  const auto poll = [] {
    if (TVMFFIEnvCheckSignals() != 0) throw ffi::EnvErrorAlreadySet();
  };
  memory::CanonicalSearch search(problem, capacity);
  const memory::Outcome outcome = search.Run(node_limit, Clock::now() + span, poll);
  if (outcome == memory::Outcome::kFeasible) {
    std::copy(search.offsets().begin(), search.offsets().end(), static_cast<int64_t*>(offsets.data_ptr()));
  }
  return {{"outcome", static_cast<int64_t>(outcome)}, {"nodes", search.nodes()}};
}

TVM_FFI_STATIC_INIT_BLOCK() {
  DefineRecord<BufferRow>("pimflow.memory.buffer");
  tvm::ffi::reflection::GlobalDef().def("pimflow.memory.search", SearchOffsets);
}

}  // namespace
}  // namespace pimflow
