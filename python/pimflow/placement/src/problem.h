/*!
 * \file problem.h
 * \brief The placement problem: regions in execution order, and candidates that cover them.
 *
 * Python makes the arrays from the cost table (`placement/solvers/problem.py`); their names are the same on both
 * sides. Candidates that behave alike in every state are one *group*: they are possible in the same states, move the
 * same tensors and leave the same state. Within a group, tasks, memory while they run, and sums differ.
 */
#ifndef PIMFLOW_PLACEMENT_PROBLEM_H_
#define PIMFLOW_PLACEMENT_PROBLEM_H_

#include <tvm/ffi/container/map.h>
#include <tvm/ffi/container/tensor.h>
#include <tvm/ffi/string.h>

#include <cstdint>
#include <string>
#include <unordered_map>
#include <vector>

#include "../../host/src/records.h"

namespace pimflow {
namespace placement {

constexpr double kNever = -1e300, kInfinite = 1e300;
constexpr int kMaxResources = 4;
constexpr size_t kMaxTasks = 256;  // of a candidate in a context
constexpr int kChannelSets = 3;  // of memory channels; each is a pool of its own

inline bool IsTime(double ns) { return ns > -1e290; }

// Rows of tables that Python makes. A field that ends in `_end` says where the row's part of another table ends; it
// begins where that of the row before ends.
PIMFLOW_RECORD(ProblemHeader, int64_t, launches_ahead,
               pim, crossbar,  // resources, or -1
               switch_task);   // of the transitions, or -1
PIMFLOW_RECORD(NumberRow, double, number);
PIMFLOW_RECORD(TaskRow, double, resource, also, launch_ns, execution_ns, energy_pj, launched, readies_channels,
               after_end);
PIMFLOW_RECORD(CandidateRow, double, error, row_bytes, filter_bytes, on_gpu, plain_memory, continues, task_end,
               step_end);
/*! \brief Bytes of a candidate's buffers at one moment, and whether its inputs and its result are live. */
PIMFLOW_RECORD(AllocationStep, int64_t, buffer_bytes, reads, writes);
/*! \brief A layout of a result: its set of channels, and its bytes there. */
PIMFLOW_RECORD(ResultLayout, int64_t, set, bytes);
PIMFLOW_RECORD(RegionRow, int64_t, can_defer, is_shared, live_end, alias, tensor_bytes, reader_end, layout_end);
/*! \brief What it costs a group to read a result in a layout, or all inputs of the network. */
PIMFLOW_RECORD(ReadCost, double, is_possible, is_copied, ns, pj);
PIMFLOW_RECORD(OperandRow, int64_t, region,
               order,  // position among all inputs of the group
               is_late, is_result, is_addend,
               is_overwritable,  // it is dead after the group, whose result may lie over it
               deferred,
               copy_outlives_source);  // the copy does not take the bytes of its source
/*! \brief A copy of an input of the network. */
PIMFLOW_RECORD(InputCopy, int64_t, order, bytes);
PIMFLOW_RECORD(ReadingRow, int64_t, reads_previous, previous_is_late,
               transform_resource,  // -1: nothing is moved
               operand_end, transition_end, input_copy_end, inner_addend_end);
PIMFLOW_RECORD(GroupRow, int64_t, begin, end, reading_number, requires_open,
               leaves_open,  // the alternative of a layer that it completes, and leaves open; 0 for none
               layout,       // of its result
               required_mode, final_mode,  // of PIM's channels: 0 any, 1 PIM, 2 plain memory
               defers_epilogue, keeps_submission_open, continues, is_dead_end, fuses_regions, leaves_partial_sum,
               fuses_epilogue, candidate_end);

struct Task {
  int resource;
  uint32_t also;  // one bit for each further resource that it holds while it executes
  double launch_ns, execution_ns, energy_pj;
  bool launched, readies_channels;
  std::vector<int> after;
};

/*! \brief How much of the next launch on a resource is hidden after a candidate was issued. */
struct Queue {
  bool used = false;
  double hidden_ns = 0, follower_hidden_ns = 0;
};

struct Candidate : CandidateRow {
  std::vector<AllocationStep> allocation_steps;
  std::vector<Task> tasks;
};

/*! \brief The predecessor state that decides the tasks of a candidate. */
struct PredecessorState {
  uint32_t deferred;  // one bit for each deferred epilogue that it does
  bool continues, switches, follows;
  bool operator==(const PredecessorState& x) const {
    return deferred == x.deferred && continues == x.continues && switches == x.switches && follows == x.follows;
  }
};

/*! \brief A candidate with its tasks in a context. */
struct ExpandedCandidate {
  int candidate;
  double energy_pj = 0, min_ns = 0;
  std::vector<Task> tasks;
  std::vector<std::pair<int, double>>
      first_launches;       // first launches by resource: task, and ns hidden by tasks before it
  bool is_awaited = false;  // with launches ahead: whether a launch may wait for it
  double path_ns = 0;
  Queue queues[kMaxResources];
  std::vector<double> sums;  // by criterion, beside time
};

/*! \brief How a group reads a result in one layout. */
struct Access {
  bool reads = false, is_late = false, is_result = false, is_possible = true, is_copied = false;
  int operand = -1;   // of the group
  int deferred = -1;  // number of the deferred epilogue that it would do
  int addend = -1;    // the region that is read, if the group's own deferred epilogue adds it
  double ns = 0, pj = 0;
};

struct Operand : OperandRow {
  Access access;
  std::vector<Access> by_layout;
};

/*! \brief What groups read that read alike in every state. */
struct Reading : ReadingRow {
  bool has_late_operands = false;
  ReadCost input_cost;
  std::vector<Operand> operands;
  std::vector<int> inner_addends;  // the groups' own regions whose results their deferred epilogue adds
  std::vector<InputCopy> input_copies;
  std::vector<int> transitions;  // by deferred epilogue, the task that applies it, or -1
};

struct Group : GroupRow {
  int number, id;  // among those with the same begin, and of all
  const Reading* reading;
  bool is_possible;
  std::vector<int> candidates;

  /*! \brief Whether its tasks may wait for the region before it, if it does these deferred epilogues. */
  bool CanFollow(uint32_t deferred) const {
    if (begin == 0) return true;
    bool is_late = reading->has_late_operands;
    for (const Operand& operand : reading->operands) {
      const Access& access = operand.access;
      if (access.is_late && access.deferred >= 0 && deferred >> access.deferred & 1) is_late = false;
    }
    return reading->reads_previous && !(is_late && reading->previous_is_late);
  }
};

struct Region : RegionRow {
  std::vector<int> readers;  // positions, ascending
  std::vector<ResultLayout> layouts;
};

using Tables = tvm::ffi::Map<tvm::ffi::String, tvm::ffi::Tensor>;

struct Problem {
  int positions, resources;
  bool launches_ahead;
  std::vector<double> longest_launch_ns;
  std::vector<Region> regions;
  std::vector<Reading> readings;
  std::vector<std::vector<Group>> groups;  // by first position
  std::vector<Candidate> candidates;
  std::vector<Task> transitions;
  int pim, crossbar;  // resources, or -1
  int switch_task;    // of `transitions`, or -1

  explicit Problem(const Tables& tables);

  /*! \brief A candidate of `group` with its tasks in a context. */
  ExpandedCandidate ExpandCandidate(const Group& group, int candidate, const PredecessorState& predecessor) const;

 private:
  void ReadReadings(const Tables& tables);
  void ReadGroups(const Tables& tables);
};

/*! \brief The evaluator's recurrence over tasks; `launches_ns`, unless null, replaces their launch times. */
inline double Execute(const std::vector<Task>& tasks, double begin_ns, double* free_ns, const double* launches_ns) {
  double ends_ns[kMaxTasks], end_ns = begin_ns;
  for (size_t i = 0; i < tasks.size(); ++i) {
    const Task& task = tasks[i];
    const double launch_ns = launches_ns ? launches_ns[i] : task.launch_ns;
    double start_ns = begin_ns > free_ns[task.resource] ? begin_ns : free_ns[task.resource];
    for (uint32_t r = 0, also = task.also; also; ++r, also >>= 1) {
      if (also & 1 && free_ns[r] - launch_ns > start_ns) start_ns = free_ns[r] - launch_ns;
    }
    for (int j : task.after) start_ns = ends_ns[j] > start_ns ? ends_ns[j] : start_ns;
    ends_ns[i] = start_ns + launch_ns + task.execution_ns;
    end_ns = ends_ns[i] > end_ns ? ends_ns[i] : end_ns;
    free_ns[task.resource] = ends_ns[i];
    for (uint32_t r = 0, also = task.also; also; ++r, also >>= 1) {
      if (also & 1) free_ns[r] = ends_ns[i];
    }
  }
  return end_ns;
}

}  // namespace placement
}  // namespace pimflow
#endif  // PIMFLOW_PLACEMENT_PROBLEM_H_
