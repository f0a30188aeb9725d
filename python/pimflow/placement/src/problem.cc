/*!
 * \file problem.cc
 * \brief Reads a problem from arrays, and expands the tasks of a candidate in its context.
 */
#include "problem.h"

#include <tvm/ffi/error.h>

#include <algorithm>

namespace pimflow {
namespace placement {

namespace {

/*! \brief Takes the rows of a table from the first on. */
template <typename Row>
class Rows {
 public:
  Rows(const Tables& tables, const std::string& name) : table_(tables.at(name)), next_(table_.begin()) {}
  const RecordTable<Row>& table() const { return table_; }
  /*! \brief The next rows, those before row number `end`. */
  std::vector<Row> Take(int64_t end) {
    const Row* begin = next_;
    next_ = table_.begin() + end;
    return {begin, next_};
  }

 private:
  RecordTable<Row> table_;
  const Row* next_;
};

/*! \brief Takes the numbers of a table from the first on. */
class Numbers : Rows<NumberRow> {
 public:
  using Rows::Rows;
  std::vector<int> Take(int64_t end) {
    std::vector<int> numbers;
    for (const NumberRow& row : Rows::Take(end)) numbers.push_back(static_cast<int>(row.number));
    return numbers;
  }
};

std::vector<Task> ReadTasks(const Tables& tables, const std::string& name) {
  std::vector<Task> tasks;
  Numbers after(tables, name + "_after");
  for (const TaskRow& row : RecordTable<TaskRow>(tables.at(name))) {
    tasks.push_back({static_cast<int>(row.resource), static_cast<uint32_t>(row.also), row.launch_ns, row.execution_ns,
                     row.energy_pj, row.launched != 0, row.readies_channels != 0,
                     after.Take(static_cast<int64_t>(row.after_end))});
  }
  return tasks;
}

/*! \brief `tasks` after the tasks `preceding`, which run in sequence. */
std::vector<Task> PrependTasks(std::vector<Task> preceding, const std::vector<Task>& tasks) {
  const int offset = static_cast<int>(preceding.size());
  if (!offset) return tasks;
  for (int i = 0; i < offset; ++i) preceding[i].after = i ? std::vector<int>{i - 1} : std::vector<int>{};
  for (const Task& task : tasks) {
    preceding.push_back(task);
    for (int& i : preceding.back().after) i += offset;
    if (task.after.empty()) preceding.back().after = {offset - 1};
  }
  return preceding;
}

/*! \brief Shorten the first launch on PIM by the time to ready its channels (`core.candidate.overlap_first_launch`). */
void OverlapFirstLaunch(std::vector<Task>& tasks, int pim) {
  size_t readying_tasks = 0;
  double readied_ns = 0;
  for (; readying_tasks < tasks.size() && tasks[readying_tasks].readies_channels; ++readying_tasks)
    readied_ns += tasks[readying_tasks].execution_ns;
  for (Task& task : tasks) {
    if (task.resource != pim || task.launch_ns == 0) continue;
    const auto waits_for_task = [&](int i) { return i >= static_cast<int>(readying_tasks); };
    if (std::none_of(task.after.begin(), task.after.end(), waits_for_task)) {
      task.launch_ns = std::max(task.launch_ns - readied_ns, 0.0);
    }
    return;
  }
}

bool UsesResource(const Task& task, int resource) { return task.resource == resource || task.also >> resource & 1; }

/*! \brief By task, a lower bound of its start after the begin (of task `first`, unless that is negative). */
std::vector<double> StartBounds(const std::vector<Task>& tasks, int resources, int first) {
  std::vector<double> starts, free(resources, kNever);
  for (int i = 0; i < static_cast<int>(tasks.size()); ++i) {
    double start = first < 0 || first == i ? 0 : kNever;
    for (int j : tasks[i].after) {
      if (IsTime(starts[j])) start = std::max(start, starts[j] + tasks[j].execution_ns);
    }
    for (int r = 0; r < resources; ++r) {
      if (UsesResource(tasks[i], r)) start = std::max(start, free[r]);
    }
    starts.push_back(start);
    for (int r = 0; r < resources; ++r) {
      if (UsesResource(tasks[i], r)) free[r] = IsTime(start) ? start + tasks[i].execution_ns : kNever;
    }
  }
  return starts;
}

double ExecutionPath(const std::vector<Task>& tasks, int resources, int first) {
  double longest = 0;
  const std::vector<double> starts = StartBounds(tasks, resources, first);
  for (size_t i = 0; i < tasks.size(); ++i) {
    if (IsTime(starts[i])) longest = std::max(longest, starts[i] + tasks[i].execution_ns);
  }
  return longest;
}

/*! \brief Launches that are issued ahead: shorten each by what the tasks before it hide (`solvers.launches`). */
void HideLaunches(ExpandedCandidate& expanded, int resources, bool follows) {
  std::vector<Task>& tasks = expanded.tasks;
  if (std::none_of(tasks.begin(), tasks.end(), [](const Task& task) { return task.launch_ns != 0; })) return;
  std::vector<double> ends, free(resources, 0), busy_ns(resources, 0), previous_ns(resources, -1);
  const std::vector<double> starts = StartBounds(tasks, resources, -1);
  for (size_t i = 0; i < tasks.size(); ++i) ends.push_back(starts[i] + tasks[i].execution_ns);
  for (size_t i = 0; i < tasks.size(); ++i) {
    Task& task = tasks[i];
    const double overlap_ns = previous_ns[task.resource];
    if (task.launch_ns != 0 && overlap_ns < 0) {
      double begin_ns = free[task.resource];
      for (int j : task.after) begin_ns = std::max(begin_ns, ends[j]);
      expanded.first_launches.emplace_back(static_cast<int>(i), follows ? begin_ns : busy_ns[task.resource]);
    }
    const bool launched = task.launch_ns != 0 || overlap_ns >= 0;
    if (overlap_ns >= 0) task.launch_ns = std::max(task.launch_ns - overlap_ns, 0.0);
    for (int r = 0; r < resources; ++r) {
      if (!UsesResource(task, r)) continue;
      if (launched) previous_ns[r] = task.execution_ns;
      free[r] = ends[i];
      busy_ns[r] += task.execution_ns;
    }
  }
}

/*! \brief The work that the tasks, with their whole launches, leave in progress: later launches overlap it. */
void SetLaunchQueues(ExpandedCandidate& expanded, const std::vector<Task>& tasks, const Problem& problem) {
  const int resources = problem.resources;
  std::vector<int> last(resources, -1);
  for (size_t i = 0; i < tasks.size(); ++i) {
    for (int r = 0; r < resources; ++r) {
      if (UsesResource(tasks[i], r) && (last[r] < 0 || tasks[i].launch_ns != 0 || tasks[i].launched)) {
        last[r] = static_cast<int>(i);
      }
    }
  }
  for (int r = 0; r < resources; ++r) {
    if (last[r] < 0 || r == problem.crossbar) continue;
    const double longest = problem.longest_launch_ns[r];
    expanded.queues[r] = {true, std::min(tasks[last[r]].execution_ns, longest),
                          std::min(ExecutionPath(tasks, resources, last[r]), longest)};
  }
  const auto& launches = problem.longest_launch_ns;
  const double longest = launches.empty() ? 0 : *std::max_element(launches.begin(), launches.end());
  expanded.path_ns = std::min(ExecutionPath(tasks, resources, -1), longest);
}

}  // namespace

Problem::Problem(const Tables& tables) {
  const ProblemHeader& header = ReadRecord<ProblemHeader>(tables.at("header"));
  launches_ahead = header.launches_ahead != 0;
  pim = static_cast<int>(header.pim), crossbar = static_cast<int>(header.crossbar);
  switch_task = static_cast<int>(header.switch_task);
  for (const NumberRow& row : RecordTable<NumberRow>(tables.at("longest_launch_ns"))) {
    longest_launch_ns.push_back(row.number);
  }
  resources = static_cast<int>(longest_launch_ns.size());
  if (resources > kMaxResources) {
    TVM_FFI_THROW(ValueError) << resources << " resources, of which at most " << kMaxResources << " are searched";
  }
  Numbers readers(tables, "reader");
  Rows<ResultLayout> layouts(tables, "layout");
  for (const RegionRow& row : RecordTable<RegionRow>(tables.at("region"))) {
    regions.push_back({row, readers.Take(row.reader_end), layouts.Take(row.layout_end)});
  }
  positions = static_cast<int>(regions.size());
  transitions = ReadTasks(tables, "transition");
  const std::vector<Task> tasks = ReadTasks(tables, "task");
  Rows<AllocationStep> steps(tables, "step");
  auto task = tasks.begin();
  for (const CandidateRow& row : RecordTable<CandidateRow>(tables.at("candidate"))) {
    const auto end = tasks.begin() + static_cast<int64_t>(row.task_end);
    candidates.push_back({row, steps.Take(static_cast<int64_t>(row.step_end)), {task, end}});
    task = end;
  }
  ReadReadings(tables);
  ReadGroups(tables);
}

void Problem::ReadReadings(const Tables& tables) {
  Numbers reading_transitions(tables, "reading_transition"), inner_addends(tables, "inner_addend");
  Rows<InputCopy> input_copies(tables, "input_copy");
  Rows<OperandRow> operands(tables, "operand");
  const ReadCost *cost = RecordTable<ReadCost>(tables.at("access")).begin(),
                 *input_cost = RecordTable<ReadCost>(tables.at("input_cost")).begin();
  for (const ReadingRow& row : RecordTable<ReadingRow>(tables.at("reading"))) {
    Reading reading{row, false, *input_cost++, {}, {}, {}, {}};
    for (const OperandRow& operand_row : operands.Take(row.operand_end)) {
      Operand operand{operand_row, {}, {}};
      Access& access = operand.access;
      access.reads = true, access.is_late = operand.is_late, access.is_result = operand.is_result;
      access.operand = static_cast<int>(reading.operands.size());
      access.addend = operand.is_addend ? static_cast<int>(operand.region) : -1;
      access.deferred = static_cast<int>(operand.deferred);
      reading.has_late_operands |= access.is_late;
      for (size_t i = 0; i < regions[operand.region].layouts.size(); ++i, ++cost) {
        operand.by_layout.push_back(access);
        Access& by_layout = operand.by_layout.back();
        by_layout.is_possible = cost->is_possible, by_layout.is_copied = cost->is_copied;
        by_layout.ns = cost->ns, by_layout.pj = cost->pj;
      }
      reading.operands.push_back(std::move(operand));
    }
    reading.transitions = reading_transitions.Take(row.transition_end);
    reading.input_copies = input_copies.Take(row.input_copy_end);
    reading.inner_addends = inner_addends.Take(row.inner_addend_end);
    readings.push_back(std::move(reading));
  }
}

void Problem::ReadGroups(const Tables& tables) {
  groups.resize(positions);
  int id = 0, candidate = 0;
  for (const GroupRow& row : RecordTable<GroupRow>(tables.at("group"))) {
    const Reading& reading = readings[row.reading_number];
    const bool is_possible = !row.is_dead_end && reading.input_cost.is_possible;
    std::vector<Group>& position_groups = groups[row.begin];
    position_groups.push_back({row, static_cast<int>(position_groups.size()), id++, &reading, is_possible, {}});
    Group& group = position_groups.back();
    while (candidate < row.candidate_end) group.candidates.push_back(candidate++);
    const auto can_continue = [&](int c) { return candidates[c].continues != 0; };
    group.continues &= std::any_of(group.candidates.begin(), group.candidates.end(), can_continue);
  }
}

ExpandedCandidate Problem::ExpandCandidate(const Group& group, int candidate,
                                           const PredecessorState& predecessor) const {
  const Candidate& source = candidates[candidate];
  ExpandedCandidate expanded;
  expanded.candidate = candidate;
  std::vector<Task> tasks = source.tasks;
  if (predecessor.continues && source.continues) {
    for (Task& task : tasks) {
      if (task.resource == pim) task.launch_ns = 0, task.launched = false;
    }
  }
  if (predecessor.switches && switch_task >= 0) {
    for (Task& task : tasks) {
      for (int& i : task.after) ++i;
    }
    tasks.insert(tasks.begin(), transitions[switch_task]);
  }
  if (!launches_ahead) OverlapFirstLaunch(tasks, pim);
  std::vector<Task> epilogues;
  const std::vector<int>& epilogue_tasks = group.reading->transitions;
  for (size_t d = 0; d < epilogue_tasks.size(); ++d) {
    if (predecessor.deferred >> d & 1 && epilogue_tasks[d] >= 0) epilogues.push_back(transitions[epilogue_tasks[d]]);
  }
  expanded.tasks = PrependTasks(std::move(epilogues), tasks);
  if (expanded.tasks.size() > kMaxTasks) {
    TVM_FFI_THROW(ValueError) << "a candidate of " << expanded.tasks.size() << " tasks";
  }
  for (const Task& task : expanded.tasks) expanded.energy_pj += task.energy_pj;
  if (launches_ahead) {
    expanded.is_awaited = !source.tasks.empty() || predecessor.follows;
    if (!source.tasks.empty()) SetLaunchQueues(expanded, std::vector<Task>(expanded.tasks), *this);
    HideLaunches(expanded, resources, predecessor.follows);
  }
  return expanded;
}

}  // namespace placement
}  // namespace pimflow
