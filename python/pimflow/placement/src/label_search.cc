/*!
 * \file label_search.cc
 * \brief Labels from position to position; see label_search.h.
 */
#include "label_search.h"

#include <algorithm>
#include <cmath>
#include <map>
#include <numeric>
#include <tuple>

namespace pimflow {
namespace placement {
namespace {

constexpr size_t kManyLabels = 1000;     // at a position, from which on stronger bounds pay
constexpr size_t kUnfilteredLabels = 512;  // of a bucket, beyond twice the filtered ones
constexpr size_t kLabelsPerClockCheck = 256;  // compared between two looks at the clock
constexpr size_t kStoredLabelFactor = 4;      // labels stored at a position for each that may be expanded
constexpr int64_t kLateBeam = 100;            // labels of a position after the deadline
constexpr size_t kHopelessLabels = 30'000;    // of a position, from which on a search is given up …
constexpr double kHopelessGap = 0.05;         // … if their bounds are by this share below the best plan

}  // namespace

LabelSearch::LabelSearch(const Problem& problem, const Query& query, const Deadline& deadline,
                         const std::function<void()>& poll, SegmentTails segment_tails)
    : problem_(problem),
      query_(query),
      deadline_(deadline),
      poll_(poll),
      live_(problem, query.CountsTime(), query.counts_memory, query.only_gpu),
      positions_(problem.positions),
      resources_(problem.resources),
      criteria_(static_cast<int>(query.criteria.size())),
      pools_(query.counts_memory ? kChannelSets : 0),
      has_capacity_(query.capacity_bytes < kInfinite),
      segment_tails_(std::move(segment_tails)) {
  PrepareBounds();
}

void LabelSearch::AddSums(ExpandedCandidate& expanded) const {
  const Candidate& candidate = problem_.candidates[expanded.candidate];
  for (const Criterion& c : query_.criteria) {
    expanded.sums.push_back(c.per_pj * expanded.energy_pj + c.per_error * candidate.error +
                            c.per_row_byte * candidate.row_bytes + c.per_filter_byte * candidate.filter_bytes);
  }
}

const LabelSearch::Expansion& LabelSearch::FindExpansion(const Group& group, const PredecessorState& predecessor) {
  auto& expansions = expansions_[group.id];
  for (const Expansion& entry : expansions) {
    if (entry.predecessor == predecessor) return entry;
  }
  expansions.push_back({predecessor, {}, std::vector<double>(criteria_, kInfinite), {}});
  Expansion& expansion = expansions.back();
  std::vector<double> free_ns(resources_), launches_ns;
  for (int candidate : group.candidates) {
    if (query_.only_gpu && !problem_.candidates[candidate].on_gpu) continue;
    if (candidate_bytes_[candidate] > query_.max_memory_bytes) continue;
    ExpandedCandidate expanded = problem_.ExpandCandidate(group, candidate, predecessor);
    AddSums(expanded);
    launches_ns.clear();
    for (const Task& task : expanded.tasks) launches_ns.push_back(task.launch_ns);
    for (const auto& launch : expanded.first_launches) launches_ns[launch.first] = 0;
    std::fill(free_ns.begin(), free_ns.end(), kNever);
    expanded.min_ns = Execute(expanded.tasks, 0, free_ns.data(), launches_ns.data());
    expansion.candidates.push_back(std::move(expanded));
  }
  for (const ExpandedCandidate& e : expansion.candidates) {
    for (int k = 0; k < criteria_; ++k) {
      double& lower_bound = expansion.lower_bounds[k];
      lower_bound = std::min(lower_bound, query_.criteria[k].per_ns * e.min_ns + e.sums[k]);
    }
  }
  if (!segments_.empty()) SetLoadBounds(group, expansion);
  return expansion;
}

/*! \brief Flags of the state after `group`, from those before it. */
uint32_t LabelSearch::NextFlags(const Group& group, uint32_t flags) const {
  flags &= kPlainMemoryMode | kUsedPlainMemory;
  if (group.final_mode) flags = (flags & kUsedPlainMemory) | (group.final_mode == 2 ? kPlainMemoryMode : 0);
  if (group.keeps_submission_open && can_continue_[group.end]) flags |= kOpenSubmission;
  if (problem_.launches_ahead && can_follow_[group.end]) flags |= kAwaitedResult;
  return flags | uint32_t(group.leaves_open) << kOpenLayerShift;
}

PredecessorState LabelSearch::MakePredecessorState(const Group& group, uint32_t flags, uint32_t deferred) const {
  const bool switches = group.required_mode && (group.required_mode == 2) != bool(flags & kPlainMemoryMode);
  return {deferred, group.continues && flags & kOpenSubmission, switches, false};
}

// ---- Rows: [resources free, end of unread results, slots ready, launches hidden (twice), peaks, sums]

LabelSearch::Bucket& LabelSearch::FindBucket(int position, const Key& key) {
  const auto [entry, is_new] = bucket_index_[position].emplace(key, static_cast<int>(buckets_[position].size()));
  if (!is_new) return buckets_[position][entry->second];
  buckets_[position].emplace_back();
  Bucket& bucket = buckets_[position].back();
  bucket.key = key;
  bucket.position = position;
  bucket.slots = static_cast<int>(key.size()) - 1;
  bucket.width =
      resources_ + 1 + bucket.slots + (problem_.launches_ahead ? 2 * resources_ : 0) + pools_ + criteria_;
  for (int i = 0; i < bucket.slots; ++i) {
    bucket.shapes.push_back(live_[key[1 + i]].shape);
    for (int k = 0; k < criteria_; ++k) bucket.tails.push_back(TailBound(bucket.shapes.back(), k));
  }
  const int segment = position < positions_ ? position_segments_[position] : 0;
  if (position && position < positions_ && segments_[segment].begin == position) {
    const auto& segment_bounds = segment_bounds_[segment];
    for (int i = 0; i < bucket.slots; ++i) {
      const auto bounds = segment_bounds.find(uint64_t(key[0] & kSegmentFlags) << 32 | key[1 + i]);
      for (int k = 0; k < criteria_ && bounds != segment_bounds.end(); ++k) {
        double& tail = bucket.tails[i * criteria_ + k];
        tail = std::max(tail, bounds->second[k]);
      }
    }
  }
  const auto [rules, has_no_rules] = raise_rules_[position].try_emplace(bucket.shapes);
  if (has_no_rules) MakeRaiseRules(position, bucket, rules->second);
  bucket.raise_rules = &rules->second;
  return bucket;
}

void LabelSearch::MakeRaiseRules(int position, const Bucket& bucket, std::vector<RaiseRule>& raise_rules) {
  const int slots = bucket.slots, first_slot = resources_ + 1;
  // Lower bounds of the begin at `u`, by slot, without slot `except`.
  const auto begin_bounds = [&](int u, int except) {
    std::vector<std::pair<int, double>> waits;
    for (int j = 0; j < slots; ++j) {
      const double way = j == except ? kNever : DelayBound(bucket.shapes[j], u);
      if (IsTime(way)) waits.emplace_back(first_slot + j, way);
    }
    return waits;
  };
  for (int i = 0; i < slots; ++i) {
    RaiseRule raise_rule{first_slot + i, {}};
    bool always_waits = true;
    for (int s = bucket.shapes[i]; s && always_waits; s = live_.Shape(s).next) {
      raise_rule.maxima.push_back(begin_bounds(live_.Shape(s).position, i));
      always_waits = !raise_rule.maxima.back().empty();
    }
    if (always_waits && bucket.shapes[i]) raise_rules.push_back(std::move(raise_rule));
    // Stored but no longer read: its time does not matter.
    if (!bucket.shapes[i]) raise_rules.push_back({first_slot + i, {}});
  }
  for (int r = 0; r < resources_; ++r) {
    RaiseRule raise_rule{r, {}};
    std::vector<int> first;  // positions that may use it next, of which none is later than another in all cases
    for (int u = position; u < positions_; ++u) {
      if (!uses_resource_[u][r]) continue;
      const auto is_later = [&](int v) {
        for (int j = 0; j < slots; ++j) {
          if (DelayBound(bucket.shapes[j], u) < DelayBound(bucket.shapes[j], v)) return false;
        }
        return true;
      };
      if (std::any_of(first.begin(), first.end(), is_later)) continue;
      first.push_back(u);
      raise_rule.maxima.push_back(begin_bounds(u, -1));
      if (raise_rule.maxima.back().empty()) break;  // it may be used at once
    }
    if (raise_rule.maxima.empty() || !raise_rule.maxima.back().empty()) raise_rules.push_back(std::move(raise_rule));
  }
}

void LabelSearch::RaiseTimes(const Bucket& bucket, double* row) const {
  for (const RaiseRule& raise_rule : *bucket.raise_rules) {
    if (raise_rule.maxima.empty()) {
      row[raise_rule.target] = 0;  // nothing waits for it any more
      continue;
    }
    double min_max = kInfinite;
    for (const auto& maximum : raise_rule.maxima) {
      double max_ns = kNever;
      for (const auto& [entry, ns] : maximum) max_ns = std::max(max_ns, row[entry] + ns);
      if ((min_max = std::min(min_max, max_ns)) <= row[raise_rule.target]) break;
    }
    row[raise_rule.target] = std::max(row[raise_rule.target], min_max);
  }
}

/*! \brief Whether every completion of `y` has one of `x` that is as good; `with_tolerance`: within the tolerances. */
bool LabelSearch::Dominates(const Bucket& bucket, const double* x, const double* y, bool with_tolerance) const {
  const double *x_sums = x + bucket.width - criteria_, *y_sums = y + bucket.width - criteria_;
  double spare_ns = kInfinite;  // how much later it may be
  for (int k = 0; k < criteria_; ++k) {
    const Criterion& criterion = query_.criteria[k];
    const double allowance = y_sums[k] - x_sums[k] + (with_tolerance ? criterion.tolerance : 0);
    if (criterion.per_ns) {
      spare_ns = std::min(spare_ns, allowance / criterion.per_ns);
    } else if (allowance < 0) {
      return false;
    }
  }
  if (pools_ && sums_pools_) {
    for (int m = 1; m <= pools_; ++m) {
      if (x_sums[-m] > y_sums[-m]) return false;
    }
  }
  if (spare_ns >= kInfinite) return true;
  const int times = resources_ + 1 + bucket.slots;
  double later_ns = kNever;
  for (int i = 0; i < times; ++i) {
    if ((later_ns = std::max(later_ns, x[i] - y[i])) > spare_ns) return false;
  }
  if (problem_.launches_ahead) {
    const double *x_hidden = x + times, *y_hidden = y + times;
    for (int r = 0; r < resources_; ++r) {
      later_ns += std::max({0.0, y_hidden[r] - x_hidden[r], y_hidden[resources_ + r] - x_hidden[resources_ + r]});
    }
  }
  return later_ns <= spare_ns;
}

void LabelSearch::AddLabel(int position, Bucket& bucket, double* row, const Origin& origin) {
  RaiseTimes(bucket, row);
  for (int k = 0; k < criteria_; ++k) {
    const double upper_bound = query_.criteria[k].upper_bound;
    if (upper_bound < kInfinite && LowerBound(position, bucket, row, k) > upper_bound) return;
  }
  bucket.rows.insert(bucket.rows.end(), row, row + bucket.width);
  bucket.origins.push_back(origin);
  if (bucket.origins.size() > 2 * bucket.filtered + kUnfilteredLabels) DropDominatedLabels(bucket);
  const auto limit = size_t(query_.max_labels);
  if (++added_labels_[position] > kStoredLabelFactor * limit && position < positions_) {  // complete plans are few
    if (CountLabels(position) > 2 * limit) LimitLabels(position, limit);
    added_labels_[position] = CountLabels(position);
  }
}

void LabelSearch::MoveLabel(Bucket& bucket, size_t from, size_t to) {
  if (from == to) return;
  std::copy_n(bucket.rows.begin() + from * bucket.width, bucket.width, bucket.rows.begin() + to * bucket.width);
  bucket.origins[to] = bucket.origins[from];
}

void LabelSearch::Truncate(Bucket& bucket, size_t count) {
  bucket.rows.resize(count * bucket.width);
  bucket.origins.resize(count);
}

/*! \brief A sort key: no label has a smaller one than a label that dominates it, so that only earlier ones may do. */
double LabelSearch::SortKey(const Bucket& bucket, const double* row) const {
  const int times = resources_ + 1 + bucket.slots;
  const double* sums = row + bucket.width - criteria_;
  if (!criteria_) return std::accumulate(sums - pools_, sums, 0.0);
  const double mean_ns = std::accumulate(row, row + times, 0.0) / times;
  double sort_keys = 0;
  for (int k = 0; k < criteria_; ++k) sort_keys += query_.criteria[k].per_ns * mean_ns + sums[k];
  return sort_keys;
}

/*! \brief Drop the labels of a bucket that another dominates. */
void LabelSearch::DropDominatedLabels(Bucket& bucket) {
  const size_t count = bucket.origins.size(), width = bucket.width;
  if (count == bucket.filtered) return;
  std::vector<double> sort_keys;
  for (size_t l = 0; l < count; ++l) sort_keys.push_back(SortKey(bucket, &bucket.rows[l * width]));
  std::vector<int> order(count), kept_labels, front;
  std::iota(order.begin(), order.end(), 0);
  std::stable_sort(order.begin(), order.end(), [&](int a, int b) { return sort_keys[a] < sort_keys[b]; });
  size_t compared = 0;
  bool is_time_up = false;  // then all remaining labels are kept
  for (int l : order) {
    const double* row = &bucket.rows[l * width];
    const bool with_tolerance = size_t(l) >= bucket.filtered;  // else tolerances would add up at one position
    bool dominated = false;
    if (!is_time_up && ++compared % kLabelsPerClockCheck == 0) is_time_up = IsTimeUp();
    for (size_t i = 0; i < front.size() && !dominated && !is_time_up; ++i) {
      if (!with_tolerance && size_t(front[i]) < bucket.filtered) continue;  // were compared earlier
      if (!Dominates(bucket, &bucket.rows[front[i] * width], row, with_tolerance)) continue;
      dominated = true;
      std::swap(front[i], front[i / 2]);  // those that dominate many come first
    }
    if (!dominated) front.push_back(l), kept_labels.push_back(l);
  }
  std::vector<char> is_kept(count);
  for (int l : kept_labels) is_kept[l] = 1;
  KeepLabels(bucket, is_kept);
  bucket.filtered = kept_labels.size();
}

/*! \brief Keep some labels of a bucket, in their order. */
void LabelSearch::KeepLabels(Bucket& bucket, const std::vector<char>& is_kept) const {
  size_t next = 0, filtered = 0;
  for (size_t l = 0; l < is_kept.size(); ++l) {
    if (!is_kept[l]) continue;
    filtered += l < bucket.filtered;
    MoveLabel(bucket, l, next++);
  }
  Truncate(bucket, next);
  bucket.filtered = filtered;
}

// ---- Transitions

void LabelSearch::ExpandBucket(int position, const Bucket& bucket) {
  const uint32_t flags = bucket.key[0];
  GroupTransition transition;
  for (const Group& group : problem_.groups[position]) {
    const bool is_possible = group.is_possible && uint32_t(group.requires_open) == flags >> kOpenLayerShift &&
                             !(group.end == positions_ && group.leaves_open);
    if (!is_possible || !MakeTransition(bucket, group, transition)) continue;
    PredecessorState predecessor = MakePredecessorState(group, flags, transition.deferred);
    if (problem_.launches_ahead) {
      predecessor.follows = (position == 0 || flags & kAwaitedResult) && group.CanFollow(transition.deferred);
    }
    GroupExpansion expansion{group, transition, FindExpansion(group, predecessor).candidates, predecessor.follows, {}};
    for (size_t label = 0; label < bucket.origins.size(); ++label) ExpandLabel(bucket, label, expansion);
  }
}

/*! \brief When the inputs of a group are ready that its tasks wait for, and those that only its result waits for. */
LabelSearch::InputTimes LabelSearch::FindInputTimes(const double* row, const GroupExpansion& expansion) const {
  InputTimes inputs{0, 0};
  for (const auto& [slot, is_late] : expansion.transition.operand_slots) {
    double& ready_ns = is_late && expansion.transition.is_late ? inputs.late_ns : inputs.begin_ns;
    ready_ns = std::max(ready_ns, row[resources_ + 1 + slot]);
  }
  inputs.late_ns = std::max(inputs.late_ns, inputs.begin_ns);
  return inputs;
}

/*! \brief The bucket of the labels that a candidate makes. */
LabelSearch::Bucket& LabelSearch::FindTarget(GroupExpansion& expansion, const ExpandedCandidate& expanded,
                                             bool is_awaited) {
  const bool uses_plain_memory = has_capacity_ && problem_.candidates[expanded.candidate].plain_memory;
  Bucket*& target = expansion.targets[is_awaited + 2 * uses_plain_memory];
  if (!target) {
    Key key = expansion.transition.key;
    if (!is_awaited) key[0] &= ~kAwaitedResult;
    if (uses_plain_memory) key[0] |= kUsedPlainMemory;
    target = &FindBucket(expansion.group.end, key);
  }
  return *target;
}

void LabelSearch::ExpandLabel(const Bucket& bucket, size_t label, GroupExpansion& expansion) {
  const auto& [group, transition, candidates, follows, targets] = expansion;
  const double* x = &bucket.rows[label * bucket.width];
  const double *hidden_ns = x + resources_ + 1 + bucket.slots, *sums = x + bucket.width - criteria_;
  double free_ns[kMaxResources], transformed_free_ns[kMaxResources], launches_ns[kMaxTasks];
  auto [begin_ns, late_ns] = FindInputTimes(x, expansion);
  std::copy_n(x, resources_, transformed_free_ns);
  if (transition.transform_ns > 0) {
    begin_ns = std::max(begin_ns, transformed_free_ns[group.reading->transform_resource]) + transition.transform_ns;
    transformed_free_ns[group.reading->transform_resource] = begin_ns;
  }
  for (const ExpandedCandidate& expanded : candidates) {
    std::copy_n(transformed_free_ns, resources_, free_ns);
    if (problem_.launches_ahead) {
      for (size_t i = 0; i < expanded.tasks.size(); ++i) launches_ns[i] = expanded.tasks[i].launch_ns;
      for (const auto& [i, candidate_ns] : expanded.first_launches) {
        const double before_ns = hidden_ns[(follows ? resources_ : 0) + expanded.tasks[i].resource];
        launches_ns[i] = std::max(launches_ns[i] - (before_ns + candidate_ns), 0.0);
      }
    }
    const double* charged_ns = problem_.launches_ahead ? launches_ns : nullptr;
    const double end_ns = std::max(late_ns, Execute(expanded.tasks, begin_ns, free_ns, charged_ns));
    const bool is_awaited = problem_.launches_ahead && expanded.is_awaited && transition.key[0] & kAwaitedResult;
    Bucket& target = FindTarget(expansion, expanded, is_awaited);
    row_.assign(free_ns, free_ns + resources_);
    AppendResultTimes(bucket, x, expansion, end_ns);
    if (problem_.launches_ahead) AppendQueues(hidden_ns, expanded, follows, is_awaited);
    if (pools_ && !AppendPeaks(group, transition, expanded, target.key, sums)) continue;
    for (int k = 0; k < criteria_; ++k) {
      row_.push_back(sums[k] + expanded.sums[k] + query_.criteria[k].per_pj * transition.transform_pj);
    }
    AddLabel(group.end, target, row_.data(), {bucket.origins[label].trace, expanded.candidate});
  }
}

/*! \brief Append the end of unread results, and when each live result is ready. */
void LabelSearch::AppendResultTimes(const Bucket& bucket, const double* x, const GroupExpansion& expansion,
                                    double end_ns) {
  const std::vector<int>& source_slots = expansion.transition.source_slots;
  const Key& key = expansion.transition.key;
  double unread_end_ns = x[resources_];
  for (int n = bucket.position; n < expansion.group.end; ++n) {
    if (problem_.regions[n].readers.empty()) unread_end_ns = std::max(unread_end_ns, end_ns);
  }
  row_.push_back(unread_end_ns);
  for (int i : source_slots) row_.push_back(i < 0 ? end_ns : x[resources_ + 1 + i]);
  // Times of equal results are sorted.
  double* slots_ns = &row_[resources_ + 1];
  for (size_t i = 1; i < source_slots.size(); ++i) {
    for (size_t j = i; j && key[j] == key[j + 1] && slots_ns[j - 1] > slots_ns[j]; --j) {
      std::swap(slots_ns[j - 1], slots_ns[j]);
    }
  }
}

/*! \brief Append how much of the next launch on each resource is hidden: if it does not wait for the group, or does. */
void LabelSearch::AppendQueues(const double* hidden_ns, const ExpandedCandidate& expanded, bool follows,
                               bool is_awaited) {
  double next_ns[kMaxResources], follower_ns[kMaxResources];
  for (int r = 0; r < resources_; ++r) {
    const Queue& queue = expanded.queues[r];
    const double before_ns = follows ? hidden_ns[resources_ + r] + expanded.path_ns : hidden_ns[r];
    next_ns[r] = std::min(queue.used ? queue.hidden_ns : hidden_ns[r], problem_.longest_launch_ns[r]);
    follower_ns[r] = std::min(queue.used ? queue.follower_hidden_ns : before_ns, problem_.longest_launch_ns[r]);
    if (!is_awaited) follower_ns[r] = next_ns[r];
  }
  row_.insert(row_.end(), next_ns, next_ns + resources_);
  row_.insert(row_.end(), follower_ns, follower_ns + resources_);
}

/*! \brief Append the peak of each pool after the candidate; false if the peaks exceed their bounds. */
bool LabelSearch::AppendPeaks(const Group& group, const GroupTransition& transition, const ExpandedCandidate& expanded,
                              const Key& key, const double* sums) {
  const double* peaks = sums - pools_;
  const int result_set = query_.only_gpu ? 0 : problem_.regions[group.end - 1].layouts[group.layout].set;
  double pool_bytes = 0;
  for (int set = 0; set < kChannelSets; ++set) {
    const double resident_bytes = transition.resident_bytes[set], input_bytes = transition.input_bytes[set];
    double peak = peaks[set], copies_bytes = 0;
    for (const auto& [order, copy_set, bytes, copy_outlives_source] : transition.copies) {
      if (copy_set != set) continue;
      peak = std::max(peak, resident_bytes + input_bytes + copies_bytes + bytes);
      if (copy_outlives_source) copies_bytes += bytes;
    }
    for (const AllocationStep& step : problem_.candidates[expanded.candidate].allocation_steps) {
      const double buffer_bytes = set == result_set ? step.buffer_bytes : 0;
      peak = std::max(peak, resident_bytes + (step.reads ? input_bytes : 0) +
                                (step.writes ? transition.output_bytes[set] : 0) + buffer_bytes + copies_bytes);
    }
    if (!sums_pools_ && peak > max_pool_bytes_[set]) return false;
    row_.push_back(peak);
    pool_bytes += peak;
  }
  if (has_capacity_ && key[0] & kUsedPlainMemory) {  // the last criterion counts rows and filters
    const double held_bytes = sums[criteria_ - 1] + expanded.sums[criteria_ - 1];
    if (held_bytes + pool_bytes > query_.capacity_bytes) return false;
  }
  return !sums_pools_ || pool_bytes <= query_.max_memory_bytes;
}

size_t LabelSearch::CountLabels(int position) const {
  const auto& buckets = buckets_[position];
  return std::accumulate(buckets.begin(), buckets.end(), size_t{0},
                         [](size_t sum, const Bucket& bucket) { return sum + bucket.origins.size(); });
}

/*! \brief Keep `limit` labels of a position, those of the smallest lower bounds. */
void LabelSearch::KeepBestLabels(int position, std::vector<RankedLabel>& order, size_t limit) {
  auto& buckets = buckets_[position];
  std::nth_element(order.begin(), order.begin() + limit, order.end());
  dropped_bound_ = std::min(dropped_bound_, std::get<0>(*std::min_element(order.begin() + limit, order.end())));
  order.resize(limit);
  std::vector<std::vector<char>> is_kept;
  for (const Bucket& bucket : buckets) is_kept.emplace_back(bucket.origins.size(), 0);
  for (const auto& [value, b, l] : order) is_kept[b][l] = 1;
  for (size_t b = 0; b < buckets.size(); ++b) KeepLabels(buckets[b], is_kept[b]);
}

/*! \brief Keep `limit` labels of a position, by bounds that are quick to compute. */
void LabelSearch::LimitLabels(int position, size_t limit) {
  std::vector<RankedLabel> order;
  for (size_t b = 0; b < buckets_[position].size(); ++b) {
    const Bucket& bucket = buckets_[position][b];
    if (bucket.origins.empty()) continue;
    const BucketBounds bounds = TableBounds(position, bucket);
    for (size_t l = 0; l < bucket.origins.size(); ++l) {
      order.emplace_back(ValueBound(position, bucket, bounds, &bucket.rows[l * bucket.width]), b, l);
    }
  }
  if (order.size() > limit) KeepBestLabels(position, order, limit);
}

/*! \brief Filter the labels of a position before they are expanded; by stronger bounds if there are many. */
void LabelSearch::PreparePosition(int position, int64_t beam) {
  auto& buckets = buckets_[position];
  const size_t limit = size_t(beam ? std::min(beam, query_.max_labels) : query_.max_labels);
  const bool uses_lookahead = CountLabels(position) > std::min(limit, kManyLabels) && position < positions_;
  std::vector<RankedLabel> order;
  for (size_t b = 0; b < buckets.size(); ++b) {
    Bucket& bucket = buckets[b];
    if (!uses_lookahead) {
      DropDominatedLabels(bucket);
      continue;
    }
    if (bucket.origins.empty()) continue;
    const BucketBounds bounds = IsTimeUp() ? TableBounds(position, bucket) : LookaheadBounds(position, bucket.key);
    const size_t width = bucket.width;
    std::vector<char> is_kept(bucket.origins.size(), 1);
    for (size_t l = 0; l < is_kept.size(); ++l) {
      for (int k = 0; k < criteria_ && is_kept[l]; ++k) {
        const double upper_bound = query_.criteria[k].upper_bound;
        is_kept[l] =
            upper_bound >= kInfinite || LowerBound(position, bucket, bounds, &bucket.rows[l * width], k) <= upper_bound;
      }
    }
    KeepLabels(bucket, is_kept);
    DropDominatedLabels(bucket);
    for (size_t l = 0; l < bucket.origins.size(); ++l) {
      order.emplace_back(ValueBound(position, bucket, bounds, &bucket.rows[l * width]), b, l);
    }
  }
  if (!beam && GivesUp(position, order)) return;
  if (order.size() > limit) KeepBestLabels(position, order, limit);
  for (Bucket& bucket : buckets) {
    for (Origin& origin : bucket.origins) {
      traces_.push_back({origin.trace, origin.candidate});
      origin.trace = static_cast<int>(traces_.size()) - 1;
    }
  }
  const int64_t count = static_cast<int64_t>(CountLabels(position));
  result_.labels += count;
  result_.max_labels_at_position = std::max(result_.max_labels_at_position, count);
}

/*! \brief Whether the search is given up at a position with these labels; then it bounds all that remain. */
bool LabelSearch::GivesUp(int position, const std::vector<RankedLabel>& order) {
  if (order.size() <= kHopelessLabels || query_.front || query_.minimises_memory) return false;
  double bound = std::get<0>(*std::min_element(order.begin(), order.end()));
  is_given_up_ = bound < (1 - kHopelessGap) * query_.criteria[0].upper_bound;
  if (!is_given_up_) return false;
  for (int p = position + 1; p <= positions_; ++p) {
    for (const Bucket& bucket : buckets_[p]) {
      for (size_t l = 0; l < bucket.origins.size(); ++l) {
        bound = std::min(bound, LowerBound(p, bucket, &bucket.rows[l * bucket.width], 0));
      }
    }
  }
  dropped_bound_ = std::min(dropped_bound_, bound);
  return true;
}

Solution LabelSearch::MakeSolution(const Bucket& bucket, size_t label) const {
  const double *row = &bucket.rows[label * bucket.width], *sums = row + bucket.width - criteria_;
  const double latency_ns = query_.CountsTime() ? row[resources_] : std::nan("");  // times may not be computed
  Solution solution{latency_ns, std::accumulate(sums - pools_, sums, 0.0), {}, {}, {}};
  std::copy(sums - pools_, sums, solution.peaks.begin());
  for (int k = 0; k < criteria_; ++k) {
    solution.values.push_back(query_.criteria[k].per_ns * row[resources_] + sums[k]);
  }
  for (int t = bucket.origins[label].trace; traces_[t].previous >= 0; t = traces_[t].previous) {
    solution.candidates.push_back(traces_[t].candidate);
  }
  std::reverse(solution.candidates.begin(), solution.candidates.end());
  return solution;
}

std::optional<Result> LabelSearch::RunExact(int64_t limit) {
  stops_at_drop_ = true;
  Result result = Run(limit);
  stops_at_drop_ = false;
  return dropped_bound_ < kInfinite ? std::nullopt : std::optional<Result>(std::move(result));
}

void LabelSearch::ClearLabels() {
  bucket_index_.assign(positions_ + 1, {});
  buckets_.clear();
  buckets_.resize(positions_ + 1);
  raise_rules_.assign(positions_ + 1, {});
  added_labels_.assign(positions_ + 1, 0);
  traces_.clear();
  dropped_bound_ = kInfinite;
  is_given_up_ = false;
  result_ = Result{};
}

/*! \brief Add a label without a past: all is free at time 0, and this much of the next launches is hidden. */
void LabelSearch::AddFirstLabel(int position, const Key& key, double hidden_ns) {
  Bucket& bucket = FindBucket(position, key);
  bucket.rows.assign(bucket.width, 0);
  if (problem_.launches_ahead) std::fill_n(&bucket.rows[resources_ + 1 + bucket.slots], 2 * resources_, hidden_ns);
  bucket.origins.push_back({-1, -1});
}

/*! \brief Expand all labels from one position on until another, or until the search is stopped or given up. */
void LabelSearch::ExpandPositions(int begin, int end, int64_t beam) {
  for (int p = begin; p < end; ++p) {
    if (IsTimeUp()) beam = kLateBeam;
    PreparePosition(p, beam);
    if ((stops_at_drop_ && dropped_bound_ < kInfinite) || is_given_up_) return;
    for (size_t b = 0; b < buckets_[p].size(); ++b) {
      poll_();
      if (IsTimeUp() && beam != kLateBeam) LimitLabels(p, beam = kLateBeam);
      const Bucket bucket = std::move(buckets_[p][b]);
      ExpandBucket(p, bucket);
    }
    buckets_[p].clear();
    bucket_index_[p].clear();
    raise_rules_[p].clear();
  }
}

Result LabelSearch::Run(int64_t beam) {
  ClearLabels();
  AddFirstLabel(0, Key(1, problem_.launches_ahead ? kAwaitedResult : 0), 0);
  ExpandPositions(0, positions_, beam);
  if (stops_at_drop_ && dropped_bound_ < kInfinite) return {};
  if (is_given_up_) buckets_[positions_].clear();
  PreparePosition(positions_, 0);
  for (const Bucket& bucket : buckets_[positions_]) {
    for (size_t l = 0; l < bucket.origins.size(); ++l) result_.solutions.push_back(MakeSolution(bucket, l));
  }
  auto& all = result_.solutions;
  std::stable_sort(all.begin(), all.end(),
                   [&](const Solution& a, const Solution& b) { return Value(a) < Value(b); });
  result_.dropped_bound = dropped_bound_;
  result_.bound = std::min(dropped_bound_, all.empty() ? kInfinite : Value(all[0]));
  return std::move(result_);
}

}  // namespace placement
}  // namespace pimflow
