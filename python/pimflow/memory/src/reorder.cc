/*!
 * \file reorder.cc
 * \brief The search for an order of steps, and the lower bound of all orders, as functions of tvm-ffi.
 */
#include <tvm/ffi/extra/c_env_api.h>
#include <tvm/ffi/tvm_ffi.h>

#include <algorithm>
#include <chrono>

#include "order_search.h"

namespace pimflow {
namespace {

namespace ffi = tvm::ffi;

/*!
 * \brief A program from int64 tables.
 * \param edges [dependencies, 2]: a step, and one that depends on it.
 * \param storages [storages, 3]: bytes, whether it holds an input, whether it holds an output.
 * \param touches [pairs, 2]: a step, and a storage that it touches; each pair once.
 */
memory::StepGraph MakeGraph(int64_t steps, ffi::TensorView edges, ffi::TensorView storages, ffi::TensorView touches) {
  memory::StepGraph graph;
  graph.before.resize(steps);
  graph.after.resize(steps);
  graph.touched.resize(steps);
  graph.storages.resize(storages.numel() / 3);
  const int64_t* row = static_cast<const int64_t*>(storages.data_ptr());
  for (size_t s = 0; s < graph.storages.size(); ++s, row += 3) {
    graph.storages[s].bytes = row[0];
    graph.storages[s].at_start = row[1] != 0;
    graph.storages[s].at_end = row[2] != 0;
  }
  auto pairs = [](ffi::TensorView table, size_t firsts, size_t seconds, const auto& visit) {
    const int64_t* pair = static_cast<const int64_t*>(table.data_ptr());
    for (int64_t i = 0; i < table.numel() / 2; ++i, pair += 2) {
      if (static_cast<size_t>(pair[0]) >= firsts || static_cast<size_t>(pair[1]) >= seconds) {
        TVM_FFI_THROW(ValueError) << "no such pair: " << pair[0] << ", " << pair[1];
      }
      visit(static_cast<int>(pair[0]), static_cast<int>(pair[1]));
    }
  };
  pairs(edges, steps, steps, [&](int first, int dependent) {
    if (first >= dependent) TVM_FFI_THROW(ValueError) << "step " << dependent << " depends on " << first;
    graph.after[first].push_back(dependent);
    graph.before[dependent].push_back(first);
  });
  pairs(touches, steps, graph.storages.size(), [&](int step, int storage) {
    graph.touched[step].push_back(storage);
    graph.storages[storage].steps.push_back(step);
  });
  return graph;
}

memory::Clock::time_point Deadline(double seconds) {
  const auto span = std::chrono::duration<double>(std::max(seconds, 0.0));
  return memory::Clock::now() + std::chrono::duration_cast<memory::Clock::duration>(span);
}

void Poll() {
  if (TVMFFIEnvCheckSignals() != 0) throw ffi::EnvErrorAlreadySet();
}

/*! \brief Bytes that every order needs; the tables are those of `MakeGraph`. */
int64_t OrderBound(int64_t steps, ffi::TensorView edges, ffi::TensorView storages, ffi::TensorView touches,
                   double seconds) {
  return memory::LowerBound(MakeGraph(steps, edges, storages, touches), Deadline(seconds), Poll);
}

/*!
 * \brief Search for an order within `limit` bytes; the tables are those of `MakeGraph`.
 * \param order int64 [steps], written if one is found.
 * \param width How many sets a layer keeps.
 * \param backwards Search from the end.
 * \return The outcome (0 found, 1 there is none, 2 stopped); the peak of the order, or the smallest limit
 *     with which the search would make another choice; and the number of sets generated.
 */
ffi::Array<int64_t> Search(int64_t steps, ffi::TensorView edges, ffi::TensorView storages,
                           ffi::TensorView touches, ffi::TensorView order, int64_t limit, int64_t width,
                           bool backwards, double seconds) {
  if (order.numel() != steps) TVM_FFI_THROW(ValueError) << order.numel() << " places for " << steps;
  memory::StepGraph graph = MakeGraph(steps, edges, storages, touches);
  if (backwards) graph = graph.Reversed();
  memory::OrderSearch search(graph, limit, static_cast<size_t>(std::max<int64_t>(width, 1)));
  const memory::OrderOutcome outcome = search.Run(Deadline(seconds), Poll);
  if (outcome != memory::OrderOutcome::kFeasible) {
    return {static_cast<int64_t>(outcome), search.next_bytes(), search.sets()};
  }
  const std::vector<int64_t> live = graph.LiveBytes(search.order());
  int64_t* place = static_cast<int64_t*>(order.data_ptr());
  for (int64_t i = 0; i < steps; ++i) {
    place[i] = backwards ? steps - 1 - search.order()[steps - 1 - i] : search.order()[i];
  }
  return {static_cast<int64_t>(outcome), live.empty() ? 0 : *std::max_element(live.begin(), live.end()),
          search.sets()};
}

TVM_FFI_STATIC_INIT_BLOCK() {
  tvm::ffi::reflection::GlobalDef()
      .def("pimflow.memory.order_bound", OrderBound)
      .def("pimflow.memory.order_search", Search);
}

}  // namespace
}  // namespace pimflow
