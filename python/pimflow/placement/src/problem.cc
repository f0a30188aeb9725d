/*!
 * \file problem.cc
 * \brief Reads a problem from arrays, and expands the tasks of a candidate in its context.
 */
#include "problem.h"

#include <tvm/ffi/error.h>

#include <algorithm>

namespace pimflow {
namespace placement {

const void* Arrays::Data(const std::string& name, int code) const {
  if (map_.find(name) == map_.end()) TVM_FFI_THROW(ValueError) << "there is no array '" << name << "'";
  const auto tensor = map_.at(name);
  const DLDataType dtype = tensor.dtype();
  if (dtype.code != code || dtype.bits != 64 || !tensor.IsContiguous()) {
    TVM_FFI_THROW(TypeError) << "array '" << name << "' has another type";
  }
  return tensor.data_ptr();
}

namespace {

std::vector<Task> ReadTasks(const Arrays& arrays, const std::string& prefix) {
  const int64_t *resource = arrays.Integers(prefix + "_resource"), *also = arrays.Integers(prefix + "_also"),
                *launched = arrays.Integers(prefix + "_launched"),
                *readies = arrays.Integers(prefix + "_readies_channels"),
                *begin = arrays.Integers(prefix + "_after_begin"), *after = arrays.Integers(prefix + "_after");
  const double *launch = arrays.Reals(prefix + "_launch_ns"), *execution = arrays.Reals(prefix + "_execution_ns"),
               *energy = arrays.Reals(prefix + "_energy_pj");
  std::vector<Task> tasks;
  for (int64_t i = 0; i < arrays.Size(prefix + "_resource"); ++i) {
    tasks.push_back({static_cast<int>(resource[i]), static_cast<uint32_t>(also[i]), launch[i], execution[i], energy[i],
                     launched[i] != 0, readies[i] != 0, std::vector<int>(after + begin[i], after + begin[i + 1])});
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

Problem::Problem(const ProblemHeader& header, const Arrays& arrays)
    : positions(static_cast<int>(header.positions)),
      resources(static_cast<int>(header.resources)),
      launches_ahead(header.launches_ahead != 0),
      pim(static_cast<int>(header.pim)),
      crossbar(static_cast<int>(header.crossbar)),
      switch_task(static_cast<int>(header.switch_task)) {
  if (resources > kMaxResources) {
    TVM_FFI_THROW(ValueError) << resources << " resources, of which at most " << kMaxResources << " are searched";
  }
  const double* longest = arrays.Reals("longest_launch_ns");
  longest_launch_ns.assign(longest, longest + resources);
  ReadRegions(arrays);
  transitions = ReadTasks(arrays, "transition");
  ReadCandidates(arrays);
  ReadReadings(arrays);
  ReadGroups(arrays);
}

void Problem::ReadRegions(const Arrays& arrays) {
  const int64_t *readers = arrays.Integers("region_reader_begin"), *reader = arrays.Integers("reader"),
                *layouts = arrays.Integers("region_layout_begin"), *set = arrays.Integers("layout_set"),
                *defers_epilogue = arrays.Integers("region_can_defer"), *shared = arrays.Integers("region_is_shared"),
                *live_end = arrays.Integers("region_live_end"), *alias = arrays.Integers("region_alias");
  const double *stored = arrays.Reals("layout_bytes"), *tensor = arrays.Reals("region_tensor_bytes");
  for (int i = 0; i < positions; ++i) {
    regions.push_back({{reader + readers[i], reader + readers[i + 1]},
                       {set + layouts[i], set + layouts[i + 1]},
                       {stored + layouts[i], stored + layouts[i + 1]},
                       defers_epilogue[i] != 0,
                       shared[i] != 0,
                       static_cast<int>(live_end[i]),
                       static_cast<int>(alias[i]),
                       tensor[i]});
  }
}

void Problem::ReadCandidates(const Arrays& arrays) {
  const std::vector<Task> tasks = ReadTasks(arrays, "task");
  const double *error = arrays.Reals("candidate_error"), *rows = arrays.Reals("candidate_row_bytes"),
               *filters = arrays.Reals("candidate_filter_bytes"), *buffer_bytes = arrays.Reals("step_buffer_bytes");
  const int64_t *on_gpu = arrays.Integers("candidate_on_gpu"),
                *plain_memory = arrays.Integers("candidate_plain_memory"),
                *continues = arrays.Integers("candidate_continues"),
                *task_begin = arrays.Integers("candidate_task_begin"),
                *step_begin = arrays.Integers("candidate_step_begin"), *reads = arrays.Integers("step_reads"),
                *writes = arrays.Integers("step_writes");
  for (int64_t i = 0; i < arrays.Size("candidate_error"); ++i) {
    Candidate c{error[i], rows[i], filters[i], on_gpu[i] != 0, plain_memory[i] != 0, continues[i] != 0, {}, {}};
    c.tasks.assign(tasks.begin() + task_begin[i], tasks.begin() + task_begin[i + 1]);
    for (int64_t m = step_begin[i]; m < step_begin[i + 1]; ++m)
      c.allocation_steps.push_back({buffer_bytes[m], reads[m] != 0, writes[m] != 0});
    candidates.push_back(std::move(c));
  }
}

void Problem::ReadReadings(const Arrays& arrays) {
  const auto column = [&](const char* name) { return arrays.Integers(std::string("reading_") + name); };
  const int64_t *is_possible = column("is_possible"), *reads_previous = column("reads_previous"),
                *previous_is_late = column("previous_is_late"), *transform_resource = column("transform_resource"),
                *operand_begin = column("operand_begin"), *transition_begin = column("transition_begin"),
                *input_copy_begin = column("input_copy_begin"), *inner_addend_begin = column("inner_addend_begin"),
                *transition = arrays.Integers("reading_transition"), *input_order = arrays.Integers("input_copy_order"),
                *inner_addends = arrays.Integers("inner_addend");
  const double *transform_ns = arrays.Reals("reading_transform_ns"),
               *transform_pj = arrays.Reals("reading_transform_pj"), *input_bytes = arrays.Reals("input_copy_bytes");
  int64_t access = 0;
  for (int64_t i = 0; i < arrays.Size("reading_is_possible"); ++i) {
    Reading reading{};
    reading.is_possible = is_possible[i], reading.reads_previous = reads_previous[i];
    reading.previous_is_late = previous_is_late[i];
    reading.transform_ns = transform_ns[i], reading.transform_pj = transform_pj[i];
    reading.transform_resource = static_cast<int>(transform_resource[i]);
    reading.transitions.assign(transition + transition_begin[i], transition + transition_begin[i + 1]);
    for (int64_t c = input_copy_begin[i]; c < input_copy_begin[i + 1]; ++c) {
      reading.input_copies.emplace_back(static_cast<int>(input_order[c]), input_bytes[c]);
    }
    reading.inner_addends.assign(inner_addends + inner_addend_begin[i], inner_addends + inner_addend_begin[i + 1]);
    for (int64_t o = operand_begin[i]; o < operand_begin[i + 1]; ++o) ReadOperand(arrays, o, access, reading);
    readings.push_back(std::move(reading));
  }
}

void Problem::ReadOperand(const Arrays& arrays, int64_t o, int64_t& access, Reading& reading) {
  Operand operand;
  operand.region = static_cast<int>(arrays.Integers("operand_region")[o]);
  operand.order = static_cast<int>(arrays.Integers("operand_order")[o]);
  operand.copy_outlives_source = arrays.Integers("operand_copy_outlives_source")[o] != 0;
  Access& plain = operand.access;
  plain.reads = true;
  plain.is_late = arrays.Integers("operand_is_late")[o] != 0;
  plain.is_result = arrays.Integers("operand_is_result")[o] != 0;
  plain.operand = static_cast<int>(reading.operands.size());
  plain.addend = arrays.Integers("operand_is_addend")[o] ? operand.region : -1;
  plain.deferred = static_cast<int>(arrays.Integers("operand_deferred")[o]);
  reading.has_late_operands |= plain.is_late;
  for (size_t l = 0; l < regions[operand.region].layout_set.size(); ++l, ++access) {
    Access by_layout = plain;
    by_layout.is_possible = arrays.Integers("access_is_possible")[access] != 0;
    by_layout.is_copied = arrays.Integers("access_is_copied")[access] != 0;
    by_layout.ns = arrays.Reals("access_ns")[access];
    by_layout.pj = arrays.Reals("access_pj")[access];
    operand.by_layout.push_back(by_layout);
  }
  reading.operands.push_back(std::move(operand));
}

void Problem::ReadGroups(const Arrays& arrays) {
  const auto column = [&](const char* name) { return arrays.Integers(std::string("group_") + name); };
  const int64_t *begin = column("begin"), *end = column("end"), *reading = column("reading"),
                *requires_open = column("requires_open"), *leaves_open = column("leaves_open"),
                *layout = column("layout"), *required_mode = column("required_mode"),
                *final_mode = column("final_mode"), *defers_epilogue = column("defers_epilogue"),
                *keeps_submission_open = column("keeps_submission_open"), *continues = column("continues"),
                *is_dead_end = column("is_dead_end"), *fuses_regions = column("fuses_regions"),
                *leaves_partial_sum = column("leaves_partial_sum"), *fuses_epilogue = column("fuses_epilogue"),
                *candidate_begin = column("candidate_begin");
  groups.resize(positions);
  for (int64_t i = 0; i < arrays.Size("group_begin"); ++i) {
    Group group{};
    group.id = static_cast<int>(i);
    group.begin = static_cast<int>(begin[i]), group.end = static_cast<int>(end[i]);
    group.number = static_cast<int>(groups[group.begin].size());
    group.reading = &readings[reading[i]];
    group.requires_open = static_cast<int>(requires_open[i]), group.leaves_open = static_cast<int>(leaves_open[i]);
    group.layout = static_cast<int>(layout[i]);
    group.required_mode = static_cast<int>(required_mode[i]), group.final_mode = static_cast<int>(final_mode[i]);
    group.defers_epilogue = defers_epilogue[i], group.keeps_submission_open = keeps_submission_open[i],
    group.continues = continues[i], group.is_possible = !is_dead_end[i] && group.reading->is_possible;
    group.fuses_regions = fuses_regions[i], group.leaves_partial_sum = leaves_partial_sum[i],
    group.fuses_epilogue = fuses_epilogue[i];
    for (int64_t c = candidate_begin[i]; c < candidate_begin[i + 1]; ++c) {
      group.candidates.push_back(static_cast<int>(c));
    }
    groups[group.begin].push_back(std::move(group));
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
