/*!
 * \file solve.cc
 * \brief The search for a plan below a capacity, as a function of tvm-ffi.
 */
#include <tvm/ffi/extra/c_env_api.h>
#include <tvm/ffi/tvm_ffi.h>

#include <algorithm>
#include <chrono>

#include "canonical_search.h"

namespace pimflow {
namespace {

namespace ffi = tvm::ffi;

constexpr int64_t kFields = 6;  // of a row: first, last, width, size, alignment, fixed

/*!
 * \brief Search for a plan of at most `capacity` bytes.
 * \param rows int64 [buffers, kFields].
 * \param offsets int64 [buffers], written if a plan is found.
 * \return The outcome (0 found, 1 there is none, 2 stopped) and the nodes searched.
 */
ffi::Array<int64_t> Search(ffi::TensorView rows, ffi::TensorView offsets, int64_t sections, int64_t capacity,
                           int64_t node_limit, double seconds) {
  if (rows.numel() % kFields || rows.numel() / kFields != offsets.numel()) {
    TVM_FFI_THROW(ValueError) << rows.numel() << " numbers for " << offsets.numel() << " buffers";
  }
  const int64_t* row = static_cast<const int64_t*>(rows.data_ptr());
  memory::Problem problem;
  problem.sections = sections;
  for (int64_t i = 0; i < offsets.numel(); ++i, row += kFields) {
    problem.buffers.push_back({row[0], row[1], row[2], row[3], 0, row[4], row[5], 0});
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
  return {static_cast<int64_t>(outcome), search.nodes()};
}

TVM_FFI_STATIC_INIT_BLOCK() {
  tvm::ffi::reflection::GlobalDef().def("pimflow.memory.search", Search);
}

}  // namespace
}  // namespace pimflow
