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

/*! \brief `tasks` after the tasks `before`, which run in sequence. */
std::vector<Task> Chained(std::vector<Task> before, const std::vector<Task>& tasks) {
  const int first = static_cast<int>(before.size());
  if (!first) return tasks;
  for (int i = 0; i < first; ++i) before[i].after = i ? std::vector<int>{i - 1} : std::vector<int>{};
  for (const Task& task : tasks) {
    before.push_back(task);
    for (int& i : before.back().after) i += first;
    if (task.after.empty()) before.back().after = {first - 1};
  }
  return before;
}

/*! \brief Shorten the first launch on PIM by the time to ready its channels (`core.candidate.overlap_first_launch`). */
void LaunchBeside(std::vector<Task>& tasks, int pim) {
  size_t before = 0;
  double readied_ns = 0;
  for (; before < tasks.size() && tasks[before].readies_channels; ++before) readied_ns += tasks[before].execution_ns;
  for (Task& task : tasks) {
    if (task.resource != pim || task.launch_ns == 0) continue;
    const auto waits = [&](int i) { return i >= static_cast<int>(before); };
    if (std::none_of(task.after.begin(), task.after.end(), waits)) {
      task.launch_ns = std::max(task.launch_ns - readied_ns, 0.0);
    }
    return;
  }
}

bool Holds(const Task& task, int resource) { return task.resource == resource || task.also >> resource & 1; }

/*! \brief By task, a lower bound of its start after the begin (of task `first`, unless that is negative). */
std::vector<double> Starts(const std::vector<Task>& tasks, int resources, int first) {
  std::vector<double> starts, free(resources, kNever);
  for (int i = 0; i < static_cast<int>(tasks.size()); ++i) {
    double start = first < 0 || first == i ? 0 : kNever;
    for (int j : tasks[i].after) {
      if (IsTime(starts[j])) start = std::max(start, starts[j] + tasks[j].execution_ns);
    }
    for (int r = 0; r < resources; ++r) {
      if (Holds(tasks[i], r)) start = std::max(start, free[r]);
    }
    starts.push_back(start);
    for (int r = 0; r < resources; ++r) {
      if (Holds(tasks[i], r)) free[r] = IsTime(start) ? start + tasks[i].execution_ns : kNever;
    }
  }
  return starts;
}

double Executing(const std::vector<Task>& tasks, int resources, int first) {
  double longest = 0;
  const std::vector<double> starts = Starts(tasks, resources, first);
  for (size_t i = 0; i < tasks.size(); ++i) {
    if (IsTime(starts[i])) longest = std::max(longest, starts[i] + tasks[i].execution_ns);
  }
  return longest;
}

/*! \brief Launches that are issued ahead: shorten each by what the tasks before it hide (`solvers.launches`). */
void LaunchAhead(Expanded& expanded, int resources, bool follows) {
  std::vector<Task>& tasks = expanded.tasks;
  if (std::none_of(tasks.begin(), tasks.end(), [](const Task& task) { return task.launch_ns != 0; })) return;
  std::vector<double> ends, free(resources, 0), held(resources, 0), before(resources, -1);
  const std::vector<double> starts = Starts(tasks, resources, -1);
  for (size_t i = 0; i < tasks.size(); ++i) ends.push_back(starts[i] + tasks[i].execution_ns);
  for (size_t i = 0; i < tasks.size(); ++i) {
    Task& task = tasks[i];
    const double hidden = before[task.resource];
    if (task.launch_ns != 0 && hidden < 0) {
      double waits = free[task.resource];
      for (int j : task.after) waits = std::max(waits, ends[j]);
      expanded.first.emplace_back(static_cast<int>(i), follows ? waits : held[task.resource]);
    }
    const bool launched = task.launch_ns != 0 || hidden >= 0;
    if (hidden >= 0) task.launch_ns = std::max(task.launch_ns - hidden, 0.0);
    for (int r = 0; r < resources; ++r) {
      if (!Holds(task, r)) continue;
      if (launched) before[r] = task.execution_ns;
      free[r] = ends[i];
      held[r] += task.execution_ns;
    }
  }
}

/*! \brief The work that the tasks, with their whole launches, leave in progress: later launches overlap it. */
void LeaveRunning(Expanded& expanded, const std::vector<Task>& tasks, const Problem& problem) {
  const int resources = problem.resources;
  std::vector<int> last(resources, -1);
  for (size_t i = 0; i < tasks.size(); ++i) {
    for (int r = 0; r < resources; ++r) {
      if (Holds(tasks[i], r) && (last[r] < 0 || tasks[i].launch_ns != 0 || tasks[i].launched)) {
        last[r] = static_cast<int>(i);
      }
    }
  }
  for (int r = 0; r < resources; ++r) {
    if (last[r] < 0 || r == problem.crossbar) continue;
    const double longest = problem.longest_launch_ns[r];
    expanded.queues[r] = {true, std::min(tasks[last[r]].execution_ns, longest),
                          std::min(Executing(tasks, resources, last[r]), longest)};
  }
  const auto& launches = problem.longest_launch_ns;
  const double longest = launches.empty() ? 0 : *std::max_element(launches.begin(), launches.end());
  expanded.executing_ns = std::min(Executing(tasks, resources, -1), longest);
}

}  // namespace

Problem::Problem(const Arrays& arrays) {
  const int64_t* scalars = arrays.Integers("scalars");  // in the order of these lines
  positions = static_cast<int>(scalars[0]);
  resources = static_cast<int>(scalars[1]);
  launches_ahead = scalars[2] != 0;
  pim = static_cast<int>(scalars[3]);
  crossbar = static_cast<int>(scalars[4]);
  switch_task = static_cast<int>(scalars[5]);
  if (resources > kMaxResources) TVM_FFI_THROW(ValueError) << resources << " resources, of which at most 4 are searched";
  const double* longest = arrays.Reals("longest_launch_ns");
  longest_launch_ns.assign(longest, longest + resources);
  ReadRegions(arrays);
  transitions = ReadTasks(arrays, "transition");
  ReadCandidates(arrays);
  ReadGroups(arrays);
}

void Problem::ReadRegions(const Arrays& arrays) {
  const int64_t *readers = arrays.Integers("region_reader_begin"), *reader = arrays.Integers("reader"),
                *layouts = arrays.Integers("region_layout_begin"), *set = arrays.Integers("layout_set"),
                *defers = arrays.Integers("region_may_defer"), *shared = arrays.Integers("region_is_shared"),
                *live_end = arrays.Integers("region_live_end"), *alias = arrays.Integers("region_alias");
  const double *stored = arrays.Reals("layout_bytes"), *tensor = arrays.Reals("region_tensor_bytes");
  for (int i = 0; i < positions; ++i) {
    regions.push_back({{reader + readers[i], reader + readers[i + 1]},
                       {set + layouts[i], set + layouts[i + 1]},
                       {stored + layouts[i], stored + layouts[i + 1]},
                       defers[i] != 0,
                       shared[i] != 0,
                       static_cast<int>(live_end[i]),
                       static_cast<int>(alias[i]),
                       tensor[i]});
  }
}

void Problem::ReadCandidates(const Arrays& arrays) {
  const std::vector<Task> tasks = ReadTasks(arrays, "task");
  const double *error = arrays.Reals("candidate_error"), *rows = arrays.Reals("candidate_row_bytes"),
               *filters = arrays.Reals("candidate_filter_bytes"), *own = arrays.Reals("moment_own_bytes");
  const int64_t *on_gpu = arrays.Integers("candidate_on_gpu"), *plain = arrays.Integers("candidate_plain_memory"),
                *continues = arrays.Integers("candidate_continues"),
                *task_begin = arrays.Integers("candidate_task_begin"),
                *moment_begin = arrays.Integers("candidate_moment_begin"), *reads = arrays.Integers("moment_reads"),
                *writes = arrays.Integers("moment_writes");
  for (int64_t i = 0; i < arrays.Size("candidate_error"); ++i) {
    Candidate c{error[i], rows[i], filters[i], on_gpu[i] != 0, plain[i] != 0, continues[i] != 0, {}, {}};
    c.tasks.assign(tasks.begin() + task_begin[i], tasks.begin() + task_begin[i + 1]);
    for (int64_t m = moment_begin[i]; m < moment_begin[i + 1]; ++m) c.moments.push_back({own[m], reads[m] != 0, writes[m] != 0});
    candidates.push_back(std::move(c));
  }
}

void Problem::ReadGroups(const Arrays& arrays) {
  const auto column = [&](const char* name) { return arrays.Integers(std::string("group_") + name); };
  const int64_t *begin = column("begin"), *end = column("end"), *resumes = column("resumes"), *opens = column("opens"),
                *layout = column("layout"), *needs = column("needs_mode"), *leaves = column("leaves_mode"),
                *defers = column("defers"), *stays = column("stays"), *continues = column("continues"),
                *possible = column("possible"), *fuses = column("fuses"), *leaves_sum = column("leaves_sum"),
                *accepts = column("accepts_deferred"), *move_resource = column("move_resource"),
                *operand_begin = column("operand_begin"), *transition_begin = column("transition_begin"),
                *candidate_begin = column("candidate_begin"), *reads_previous = column("reads_previous"),
                *previous_is_late = column("previous_is_late"),
                *input_copy_begin = column("input_copy_begin"), *input_order = arrays.Integers("input_copy_order"),
                *inner_added_begin = column("inner_added_begin"), *inner_added = arrays.Integers("inner_added");
  const double *move_ns = arrays.Reals("group_move_ns"), *move_pj = arrays.Reals("group_move_pj"),
               *input_bytes = arrays.Reals("input_copy_bytes");
  const int64_t* transition = arrays.Integers("group_transition");
  groups.resize(positions);
  int next_candidate = 0;
  int64_t access = 0;
  for (int64_t i = 0; i < arrays.Size("group_begin"); ++i) {
    Group g{};
    g.id = static_cast<int>(i);
    g.begin = static_cast<int>(begin[i]), g.end = static_cast<int>(end[i]);
    g.number = static_cast<int>(groups[g.begin].size());
    g.resumes = static_cast<int>(resumes[i]), g.opens = static_cast<int>(opens[i]);
    g.layout = static_cast<int>(layout[i]);
    g.needs_mode = static_cast<int>(needs[i]), g.leaves_mode = static_cast<int>(leaves[i]);
    g.defers = defers[i], g.stays = stays[i], g.continues = continues[i], g.possible = possible[i];
    g.fuses = fuses[i], g.leaves_sum = leaves_sum[i], g.accepts_deferred = accepts[i];
    g.move_ns = move_ns[i], g.move_pj = move_pj[i];
    g.move_resource = static_cast<int>(move_resource[i]);
    g.transitions.assign(transition + transition_begin[i], transition + transition_begin[i + 1]);
    g.reads_previous = reads_previous[i], g.previous_is_late = previous_is_late[i];
    for (int64_t c = input_copy_begin[i]; c < input_copy_begin[i + 1]; ++c) {
      g.input_copies.emplace_back(static_cast<int>(input_order[c]), input_bytes[c]);
    }
    g.inner_added.assign(inner_added + inner_added_begin[i], inner_added + inner_added_begin[i + 1]);
    for (int64_t o = operand_begin[i]; o < operand_begin[i + 1]; ++o) ReadOperand(arrays, o, access, g);
    for (int64_t c = candidate_begin[i]; c < candidate_begin[i + 1]; ++c) g.candidates.push_back(next_candidate++);
    groups[g.begin].push_back(std::move(g));
  }
}

void Problem::ReadOperand(const Arrays& arrays, int64_t o, int64_t& access, Group& group) {
  Operand operand;
  operand.region = static_cast<int>(arrays.Integers("operand_region")[o]);
  operand.order = static_cast<int>(arrays.Integers("operand_order")[o]);
  operand.copy_outlives = arrays.Integers("operand_copy_outlives")[o] != 0;
  Access& plain = operand.access;
  plain.reads = true;
  plain.late = arrays.Integers("operand_late")[o] != 0;
  plain.is_result = arrays.Integers("operand_is_result")[o] != 0;
  plain.operand = static_cast<int>(group.operands.size());
  plain.added = arrays.Integers("operand_is_added")[o] ? operand.region : -1;
  plain.deferred = static_cast<int>(arrays.Integers("operand_deferred")[o]);
  group.has_late |= plain.late;
  for (size_t l = 0; l < regions[operand.region].layout_set.size(); ++l, ++access) {
    Access by_layout = plain;
    by_layout.possible = arrays.Integers("access_possible")[access] != 0;
    by_layout.copied = arrays.Integers("access_copied")[access] != 0;
    by_layout.ns = arrays.Reals("access_ns")[access];
    by_layout.pj = arrays.Reals("access_pj")[access];
    operand.by_layout.push_back(by_layout);
  }
  group.operands.push_back(std::move(operand));
}

Expanded Problem::Expand(const Group& group, int candidate, const Context& context) const {
  const Candidate& own = candidates[candidate];
  Expanded expanded;
  expanded.candidate = candidate;
  std::vector<Task> tasks = own.tasks;
  if (context.continues && own.continues) {
    for (Task& task : tasks) {
      if (task.resource == pim) task.launch_ns = 0, task.launched = false;
    }
  }
  if (context.switches && switch_task >= 0) {
    for (Task& task : tasks) {
      for (int& i : task.after) ++i;
    }
    tasks.insert(tasks.begin(), transitions[switch_task]);
  }
  if (!launches_ahead) LaunchBeside(tasks, pim);
  std::vector<Task> applied;
  for (size_t d = 0; d < group.transitions.size(); ++d) {
    if (context.deferred >> d & 1 && group.transitions[d] >= 0) applied.push_back(transitions[group.transitions[d]]);
  }
  expanded.tasks = Chained(std::move(applied), tasks);
  if (expanded.tasks.size() > kMaxTasks) TVM_FFI_THROW(ValueError) << "a candidate of " << expanded.tasks.size() << " tasks";
  for (const Task& task : expanded.tasks) expanded.energy_pj += task.energy_pj;
  if (launches_ahead) {
    expanded.awaited = !own.tasks.empty() || context.follows;
    if (!own.tasks.empty()) LeaveRunning(expanded, std::vector<Task>(expanded.tasks), *this);
    LaunchAhead(expanded, resources, context.follows);
  }
  return expanded;
}

}  // namespace placement
}  // namespace pimflow
