/*!
 * \file bounds.cc
 * \brief Lower bounds of a label's values at the end of the network.
 *
 * Chains of results (`TailBound`), the load of every mix of resources, and both combined over the regions up to the next
 * narrow position (`LookaheadBounds`), after which all work waits for one result; what follows: segment_search.cc.
 */
#include <algorithm>
#include <array>
#include <map>
#include <numeric>

#include "label_search.h"

namespace pimflow {
namespace placement {
namespace {

constexpr int kMixParts = 8;  // weights of a mix of resources are multiples of 1/8
constexpr size_t kSegmentMixes = 6;  // mixes with the best bounds, which are used in a segment

}  // namespace

void LabelSearch::MakeMixes(std::vector<int>& parts, int resource, int parts_left) {
  if (resource + 1 < resources_) {
    for (parts[resource] = 0; parts[resource] <= parts_left; ++parts[resource]) {
      MakeMixes(parts, resource + 1, parts_left - parts[resource]);
    }
    return;
  }
  parts[resource] = parts_left;
  mixes_.emplace_back();
  for (int part : parts) mixes_.back().push_back(double(part) / kMixParts);
}

void LabelSearch::PrepareBounds() {
  int groups = 0;
  is_straddled_.assign(positions_ + 1, 0);
  can_continue_.assign(positions_ + 1, 0);
  can_follow_.assign(positions_ + 1, 0);
  for (const auto& position_groups : problem_.groups) {
    groups += static_cast<int>(position_groups.size());
    for (const Group& group : position_groups) {
      for (int q = group.begin + 1; q < group.end; ++q) is_straddled_[q] = 1;
      can_continue_[group.begin] |= group.continues;
      can_follow_[group.begin] |= group.reading->reads_previous;
    }
  }
  expansions_.resize(groups);
  PreparePoolBounds();
  PrepareGroupBounds(groups);
  PrepareResourceUses();
  delays_.resize(live_.shapes());
  tail_bounds_.assign(criteria_, std::vector<double>(live_.shapes(), -1));
  for (int n = positions_ - 1; n >= 0; --n) {  // from the last on: the recursion stays flat
    for (int k = 0; k < criteria_; ++k) TailBound(live_.ResultShape(n), k);
  }
  MakeSegments();
  std::vector<int> parts(resources_);
  MakeMixes(parts, 0, kMixParts);
  load_bounds_.assign(criteria_, std::vector<std::vector<double>>(positions_ + 1));
  group_end_bounds_.assign(criteria_, std::vector<double>(groups * kFlagSets, 0));
  segment_bounds_.resize(segments_.size());
  group_classes_.resize(positions_), lookaheads_.resize(positions_ + 1);
  for (int s = static_cast<int>(segments_.size()) - 1; s >= 0; --s) PrepareSegment(s);
}

/*! \brief Bound sums from each position on, and each group beyond them. */
void LabelSearch::PrepareGroupBounds(int groups) {
  min_ns_.assign(groups, kInfinite);
  sum_bounds_.assign(criteria_, std::vector<double>(positions_ + 1, kInfinite));
  group_bounds_.assign(criteria_, std::vector<double>(groups, kInfinite));
  for (int k = 0; k < criteria_; ++k) sum_bounds_[k][positions_] = 0;
  for (int p = positions_ - 1; p >= 0; --p) {
    for (const Group& group : problem_.groups[p]) {
      // Every candidate after its cheapest predecessor: no deferred epilogues, and all launches hidden that may be.
      const Expansion& expansion = FindExpansion(group, {0, group.continues != 0, false, false});
      for (const ExpandedCandidate& e : expansion.candidates) {
        min_ns_[group.id] = std::min(min_ns_[group.id], e.min_ns);
        for (int k = 0; k < criteria_; ++k) {
          sum_bounds_[k][p] = std::min(sum_bounds_[k][p], e.sums[k] + sum_bounds_[k][group.end]);
        }
      }
    }
    for (const Group& group : problem_.groups[p]) {
      for (int k = 0; k < criteria_; ++k) {
        if (!CanComplete(group, k)) continue;  // no plan contains it
        const double lower_bound = expansions_[group.id].front().lower_bounds[k];
        group_bounds_[k][group.id] = lower_bound + sum_bounds_[k][group.end] - sum_bounds_[k][group.begin];
      }
    }
  }
}

/*!
 * \brief Lower bounds of the bytes that are live during a group; plus 2 if its inputs are, plus 1 if its outputs are.
 *
 * Each result counts with the fewest bytes of its layouts, and an alias class with its largest result: so parts of it
 * may lie in one set of channels or in several.
 */
std::array<double, 4> LabelSearch::LiveBytes(const Group& group) const {
  std::array<double, 4> live_bytes{};
  std::map<int, std::array<double, 4>> alias_classes;
  for (int n = 0; n < group.end; ++n) {
    const Region& region = problem_.regions[n];
    const bool is_input = n < group.begin, outlives = region.live_end > group.end;
    if (is_input ? region.live_end <= group.begin : region.live_end <= n) continue;
    if (group.fuses_regions && !is_input && n + 1 < group.end && !outlives) continue;  // never stored
    double min_bytes = kInfinite;
    for (const ResultLayout& layout : region.layouts) min_bytes = std::min(min_bytes, double(layout.bytes));
    auto& alias_class = alias_classes[region.alias < 0 ? -1 - n : int(region.alias)];
    for (int i = 0; i < 4; ++i) {
      // An output that does not outlive the group may count as an input of its class.
      const bool is_live = is_input ? outlives || i & 2 : i & 1 && (outlives || i & 2);
      if (is_live) alias_class[i] = std::max(alias_class[i], min_bytes);
    }
  }
  for (const auto& [alias, bytes] : alias_classes) {
    for (int i = 0; i < 4; ++i) live_bytes[i] += bytes[i];
  }
  const auto& operands = group.reading->operands;
  if (std::any_of(operands.begin(), operands.end(), [](const Operand& o) { return o.is_overwritable; })) {
    live_bytes[3] -= alias_classes[-int(group.end)][3];  // the result may lie over an operand
  }
  return live_bytes;
}

/*! \brief Bound the pools from each position on: together they are no smaller than what is live at one time. */
void LabelSearch::PreparePoolBounds() {
  pool_bounds_.assign(positions_ + 1, 0);
  candidate_bytes_.assign(problem_.candidates.size(), 0);
  for (int p = positions_ - 1; p >= 0 && pools_; --p) {
    pool_bounds_[p] = kInfinite;
    for (const Group& group : problem_.groups[p]) {
      const std::array<double, 4> live_bytes = LiveBytes(group);
      for (int candidate : group.candidates) {
        double& bytes = candidate_bytes_[candidate] = pool_bounds_[group.end];
        for (const AllocationStep& step : problem_.candidates[candidate].allocation_steps) {
          bytes = std::max(bytes, step.buffer_bytes + live_bytes[2 * (step.reads != 0) + (step.writes != 0)]);
        }
        pool_bounds_[p] = std::min(pool_bounds_[p], bytes);
      }
    }
  }
}

/*! \brief Note which resources the groups at each position may use. */
void LabelSearch::PrepareResourceUses() {
  uses_resource_.assign(positions_, std::vector<char>(resources_));
  for (int q = 0; q < positions_; ++q) {
    for (const Group& group : problem_.groups[q]) {
      if (group.reading->transform_resource >= 0) uses_resource_[q][group.reading->transform_resource] = 1;
      for (int task : group.reading->transitions) {
        if (task >= 0) MarkUses(problem_.transitions[task], uses_resource_[q]);
      }
      if (group.required_mode && problem_.switch_task >= 0) {
        MarkUses(problem_.transitions[problem_.switch_task], uses_resource_[q]);
      }
      for (int candidate : group.candidates) {
        for (const Task& task : problem_.candidates[candidate].tasks) MarkUses(task, uses_resource_[q]);
      }
    }
  }
}

/*! \brief Divide the positions behind the narrow ones, after which all work waits for one result. */
void LabelSearch::MakeSegments() {
  int begin = 0;
  for (int p = 0; p < positions_; ++p) {
    bool is_narrow = !is_straddled_[p] && !is_straddled_[p + 1];
    for (int n = 0; n < p && is_narrow; ++n) is_narrow = IsTime(DelayBound(live_.ResultShape(n), p));
    for (int u = p + 1; u < positions_ && is_narrow; ++u) is_narrow = IsTime(DelayBound(live_.ResultShape(p), u));
    position_segments_.push_back(static_cast<int>(segments_.size()));
    if (!is_narrow && p + 1 < positions_) continue;
    segments_.push_back({begin, p + 1, {}, false});
    begin = p + 1;
  }
}

/*! \brief A lower bound of the load of a group's candidates on a mix of resources. */
double LabelSearch::LoadBound(const Expansion& expansion, int k, const std::vector<double>& mix) const {
  const double per_ns = query_.criteria[k].per_ns;
  double min_value = kInfinite;
  for (const ExpandedCandidate& e : expansion.candidates) {
    double sum = e.sums[k];
    for (const Task& task : e.tasks) {
      // A launch that may hide takes no time; `min_ns` is of the same tasks.
      sum += per_ns * mix[task.resource] * (task.execution_ns + task.launch_ns);
      for (int r = 0; r < resources_; ++r) {
        if (task.also >> r & 1 && r != task.resource) sum += per_ns * mix[r] * task.execution_ns;
      }
    }
    for (const auto& launch : e.first_launches) {
      const Task& task = e.tasks[launch.first];
      sum -= per_ns * mix[task.resource] * task.launch_ns;
    }
    min_value = std::min(min_value, sum);
  }
  return min_value;
}

/*! \brief The key of a state in which only the result of `group` is live; `flags` are those before it. */
LabelSearch::Key LabelSearch::NextKey(const Group& group, uint32_t flags) const {
  const ResultId result = live_.FindResult(group.end - 1, group.layout, NextDeferral(group));
  Key key{NextFlags(group, flags) & kSegmentFlags};
  if (const ResultId id = live_.AdvanceResult(result, group.end)) key.push_back(id);
  return key;
}

/*! \brief Choose the mixes of resources with the best bounds of a criterion over a segment. */
void LabelSearch::ChooseMixes(Segment& segment, int k) const {
  const int begin = segment.begin, end = segment.end;
  std::vector<std::pair<double, int>> order;
  std::vector<double> loads(end - begin + 1);
  for (size_t m = 0; m < mixes_.size(); ++m) {
    loads[end - begin] = 0;
    for (int u = end - 1; u >= begin; --u) {
      double& load = loads[u - begin] = kInfinite;
      for (const Group& group : problem_.groups[u]) {
        if (!CanComplete(group, k)) continue;
        const double group_load = LoadBound(expansions_[group.id].front(), k, mixes_[m]);
        load = std::min(load, group_load + SumBoundChange(group, k) + loads[group.end - begin]);
      }
    }
    order.emplace_back(-loads[0], static_cast<int>(m));
  }
  std::sort(order.begin(), order.end());
  for (size_t i = 0; i < order.size() && i < kSegmentMixes; ++i) segment.mixes[k].push_back(order[i].second);
}

/*! \brief Bound the load on each mix of a segment from position `u` on. */
void LabelSearch::SetPositionLoads(const Segment& segment, int u, int k) {
  std::vector<double>& loads = load_bounds_[k][u];
  loads.assign(segment.mixes[k].size(), kInfinite);
  for (const Group& group : problem_.groups[u]) {
    if (!CanComplete(group, k)) continue;
    const double* end_bounds = &group_end_bounds_[k][group.id * kFlagSets];
    const double end_bound = *std::min_element(end_bounds, end_bounds + kFlagSets);
    for (size_t i = 0; i < loads.size(); ++i) {
      const double group_load = LoadBound(expansions_[group.id].front(), k, mixes_[segment.mixes[k][i]]);
      const double next = group.end == segment.end ? end_bound : load_bounds_[k][group.end][i];
      loads[i] = std::min(loads[i], group_load + SumBoundChange(group, k) + next);
    }
  }
}

/*! \brief Lower bounds of an expansion of a group, by criterion and mix of the segment. */
void LabelSearch::SetLoadBounds(const Group& group, Expansion& expansion) const {
  const Segment& segment = segments_[position_segments_[group.begin]];
  expansion.load_bounds.clear();
  for (int k = 0; k < criteria_; ++k) {
    for (int m : segment.mixes[k]) expansion.load_bounds.push_back(LoadBound(expansion, k, mixes_[m]));
  }
}

void LabelSearch::MarkUses(const Task& task, std::vector<char>& uses) const {
  for (int r = 0; r < resources_; ++r) {
    if (task.resource == r || task.also >> r & 1) uses[r] = 1;
  }
}

/*! \brief A lower bound of the time from a result to the groups at `position`; `kNever` if they do not wait for it. */
double LabelSearch::DelayBound(int shape, int position) {
  if (!shape) return kNever;
  Delays& delays = delays_[shape];
  if (delays.begins_ns.empty()) ComputeDelays(shape, delays);
  return position < delays.first ? kNever : delays.begins_ns[position - delays.first];
}

void LabelSearch::ComputeDelays(int shape, Delays& delays) {
  delays.first = live_.Shape(shape).position;
  while (is_straddled_[delays.first]) --delays.first;  // groups that begin before the reader may contain it
  std::vector<double> ready_ns(positions_, kInfinite);
  std::fill(ready_ns.begin(), ready_ns.begin() + delays.first, kNever);
  for (int q = delays.first; q < positions_; ++q) {
    const ReadShape& read = live_.Shape(shape);
    double begin_ns = kInfinite;
    size_t next = 0;  // of the groups that read it
    for (const Group& group : problem_.groups[q]) {
      double starts_ns = kNever, ends_ns = kNever;
      for (const Operand& operand : group.reading->operands) {
        double& waits_ns = operand.access.is_late ? ends_ns : starts_ns;
        waits_ns = std::max(waits_ns, ready_ns[operand.region]);
      }
      if (read.position == q && next < read.groups.size() && read.groups[next].first == group.number) {
        double& waits_ns = read.groups[next++].second ? ends_ns : starts_ns;
        waits_ns = std::max(waits_ns, 0.0);
      }
      begin_ns = std::min(begin_ns, starts_ns);
      if (IsTime(starts_ns)) ends_ns = std::max(ends_ns, starts_ns + min_ns_[group.id]);
      for (int n = q; n < group.end; ++n) ready_ns[n] = std::min(ready_ns[n], ends_ns);
    }
    delays.begins_ns.push_back(begin_ns);
    if (read.position == q) shape = read.next;
  }
}

/*! \brief A lower bound of a criterion, beyond `sum_bounds_`, from a result to the end of the network. */
double LabelSearch::TailBound(int shape, int k) {
  if (!shape) return 0;
  if (tail_bounds_[k][shape] >= 0) return tail_bounds_[k][shape];
  const ReadShape& read = live_.Shape(shape);
  const double tail = TailBound(read.next, k);
  double min_value = is_straddled_[read.position] ? tail : kInfinite;
  size_t next = 0;
  for (const Group& group : problem_.groups[read.position]) {
    const double tail_bound = TailBound(live_.ResultShape(group.end - 1), k);
    if (next < read.groups.size() && read.groups[next].first == group.number) {
      const bool is_late = read.groups[next++].second;
      min_value = std::min(min_value, std::max(tail, is_late ? tail_bound : tail_bound + group_bounds_[k][group.id]));
    } else {
      min_value = std::min(min_value, tail);
    }
  }
  return tail_bounds_[k][shape] = std::max(min_value, 0.0);
}

/*! \brief The bounds of a bucket without looking ahead. */
LabelSearch::BucketBounds LabelSearch::TableBounds(int position, const Bucket& bucket) const {
  BucketBounds bounds;
  for (int k = 0; k < criteria_; ++k) {
    bounds.tails.emplace_back();
    for (int i = 0; i < bucket.slots; ++i) bounds.tails[k].push_back(bucket.tails[i * criteria_ + k]);
    bounds.loads.push_back(load_bounds_[k][position]);
  }
  return bounds;
}

double LabelSearch::LowerBound(int position, const Bucket& bucket, const double* row, int k) const {
  const double per_ns = query_.criteria[k].per_ns;
  double max_value = per_ns * row[resources_];
  for (int i = 0; i < bucket.slots; ++i) {
    max_value = std::max(max_value, per_ns * row[resources_ + 1 + i] + bucket.tails[i * criteria_ + k]);
  }
  return max_value + row[bucket.width - criteria_ + k] + sum_bounds_[k][position];
}

double LabelSearch::LowerBound(int position, const Bucket& bucket, const BucketBounds& bounds, const double* row,
                               int k) const {
  const double per_ns = query_.criteria[k].per_ns;
  double max_value = per_ns * row[resources_];
  for (int i = 0; i < bucket.slots; ++i)
    max_value = std::max(max_value, per_ns * row[resources_ + 1 + i] + bounds.tails[k][i]);
  const std::vector<int>& mixes = segments_[position_segments_[position]].mixes[k];
  for (size_t i = 0; i < mixes.size(); ++i) {
    double sum = bounds.loads[k][i];
    for (int r = 0; r < resources_; ++r) sum += per_ns * mixes_[mixes[i]][r] * row[r];
    max_value = std::max(max_value, sum);
  }
  return max_value + row[bucket.width - criteria_ + k] + sum_bounds_[k][position];
}

double LabelSearch::ValueBound(int position, const Bucket& bucket, const BucketBounds& bounds,
                               const double* row) const {
  if (!query_.minimises_memory) return LowerBound(position, bucket, bounds, row, 0);
  const double* peaks = row + bucket.width - criteria_ - pools_;
  return std::max(std::accumulate(peaks, peaks + pools_, 0.0), pool_bounds_[position]);
}

}  // namespace placement
}  // namespace pimflow
