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
constexpr size_t kLabelsByClock = 256;   // compared between two looks at the clock
constexpr size_t kOffersByLabel = 4;     // labels stored at a position for each that may be expanded
constexpr int64_t kHastyBeam = 200;      // labels of a position after the deadline

}  // namespace

LabelSearch::LabelSearch(const Problem& problem, const Question& question, Clock::time_point deadline,
                         const std::function<void()>& poll)
    : problem_(problem),
      question_(question),
      deadline_(deadline),
      poll_(poll),
      live_(problem, question.CountsTime(), question.counts_memory, question.only_gpu),
      positions_(problem.positions),
      resources_(problem.resources),
      criteria_(static_cast<int>(question.criteria.size())),
      pools_(question.counts_memory ? kChannelSets : 0),
      capacity_(question.capacity_bytes < kInfinite) {
  PrepareBounds();
}

void LabelSearch::AddSums(Expanded& expanded) const {
  const Candidate& candidate = problem_.candidates[expanded.candidate];
  for (const Criterion& c : question_.criteria) {
    expanded.sums.push_back(c.per_pj * expanded.energy_pj + c.per_error * candidate.error +
                            c.per_row_byte * candidate.row_bytes + c.per_filter_byte * candidate.filter_bytes);
  }
}

const LabelSearch::Expansion& LabelSearch::ExpandedIn(const Group& group, const Context& context) {
  auto& by_context = expanded_[group.id];
  for (const Expansion& known : by_context) {
    if (known.context == context) return known;
  }
  by_context.push_back({context, {}, std::vector<double>(criteria_, kInfinite), {}});
  Expansion& expansion = by_context.back();
  std::vector<double> free_ns(resources_), launches_ns;
  for (int candidate : group.candidates) {
    if (question_.only_gpu && !problem_.candidates[candidate].on_gpu) continue;
    Expanded expanded = problem_.Expand(group, candidate, context);
    AddSums(expanded);
    launches_ns.clear();
    for (const Task& task : expanded.tasks) launches_ns.push_back(task.launch_ns);
    for (const auto& first : expanded.first) launches_ns[first.first] = 0;
    std::fill(free_ns.begin(), free_ns.end(), kNever);
    expanded.least_ns = Execute(expanded.tasks, 0, free_ns.data(), launches_ns.data());
    expansion.candidates.push_back(std::move(expanded));
  }
  if (!problem_.launches_ahead) LeaveOutDominated(expansion.candidates);
  for (const Expanded& e : expansion.candidates) {
    for (int k = 0; k < criteria_; ++k) {
      double& weight = expansion.weights[k];
      weight = std::min(weight, question_.criteria[k].per_ns * e.least_ns + e.sums[k]);
    }
  }
  if (!segments_.empty()) FindWork(group, expansion);
  return expansion;
}

/*! \brief Flags of the state after `group`, from those before it. */
uint32_t LabelSearch::FlagsBehind(const Group& group, uint32_t flags) const {
  flags &= kPlainMemoryMode | kUsedPlainMemory;
  if (group.leaves_mode) flags = (flags & kUsedPlainMemory) | (group.leaves_mode == 2 ? kPlainMemoryMode : 0);
  if (group.stays && may_continue_[group.end]) flags |= kSubmissionOpen;
  if (problem_.launches_ahead && may_follow_[group.end]) flags |= kAwaited;
  return flags | uint32_t(group.opens) << kOpensShift;
}

Context LabelSearch::ContextOf(const Group& group, uint32_t flags, uint32_t deferred) const {
  const bool switches = group.needs_mode && (group.needs_mode == 2) != bool(flags & kPlainMemoryMode);
  return {deferred, group.continues && flags & kSubmissionOpen, switches, false};
}

/*!
 * \brief Drop dominated candidates: another is as good in its delays from the begin and from each resource to each
 *   resource and to the end, in all sums, and in memory.
 */
void LabelSearch::LeaveOutDominated(std::vector<Expanded>& expanded) const {
  const auto delays = [&](const Expanded& e) {
    std::vector<double> all, free_ns(resources_);
    for (int source = -1; source < resources_; ++source) {
      std::fill(free_ns.begin(), free_ns.end(), kNever);
      if (source >= 0) free_ns[source] = 0;
      all.push_back(Execute(e.tasks, source < 0 ? 0 : kNever, free_ns.data(), nullptr));
      all.insert(all.end(), free_ns.begin(), free_ns.end());
    }
    return all;
  };
  const auto holds_less = [&](const Candidate& a, const Candidate& b) {
    if (a.moments.size() != b.moments.size() || a.plain_memory > b.plain_memory) return false;
    for (size_t i = 0; i < a.moments.size(); ++i) {
      const Moment &x = a.moments[i], &y = b.moments[i];
      if (x.own_bytes > y.own_bytes || x.reads > y.reads || x.writes > y.writes) return false;
    }
    return true;
  };
  const auto as_good = [&](const Expanded& a, const std::vector<double>& x, const Expanded& b,
                           const std::vector<double>& y) {
    double later_ns = 0;
    for (size_t i = 0; i < x.size(); ++i) {
      if (IsTime(x[i])) later_ns = std::max(later_ns, IsTime(y[i]) ? x[i] - y[i] : kInfinite);
    }
    for (int k = 0; k < criteria_; ++k) {
      const double per_ns = question_.criteria[k].per_ns;
      if ((per_ns ? per_ns * later_ns : 0) + a.sums[k] - b.sums[k] > 0) return false;
    }
    return !pools_ || holds_less(problem_.candidates[a.candidate], problem_.candidates[b.candidate]);
  };
  std::vector<std::pair<Expanded, std::vector<double>>> best;
  for (Expanded& e : expanded) {
    const std::vector<double> mine = delays(e);
    const auto beats = [&](const auto& b) { return as_good(b.first, b.second, e, mine); };
    if (std::any_of(best.begin(), best.end(), beats)) continue;
    const auto beaten = [&](const auto& b) { return as_good(e, mine, b.first, b.second); };
    best.erase(std::remove_if(best.begin(), best.end(), beaten), best.end());
    best.emplace_back(std::move(e), mine);
  }
  expanded.clear();
  for (auto& b : best) expanded.push_back(std::move(b.first));
}

// ---- Rows: [resources free, end of unread results, slots ready, launches hidden (twice), peaks, sums]

LabelSearch::Bucket& LabelSearch::BucketAt(int position, const Key& key) {
  const auto [at, fresh] = index_[position].emplace(key, static_cast<int>(buckets_[position].size()));
  if (!fresh) return buckets_[position][at->second];
  buckets_[position].emplace_back();
  Bucket& bucket = buckets_[position].back();
  bucket.key = key;
  bucket.position = position;
  bucket.slots = static_cast<int>(key.size()) - 1;
  bucket.width =
      resources_ + 1 + bucket.slots + (problem_.launches_ahead ? 2 * resources_ : 0) + pools_ + criteria_;
  for (int i = 0; i < bucket.slots; ++i) {
    bucket.shapes.push_back(live_[key[1 + i]].shape);
    for (int k = 0; k < criteria_; ++k) bucket.tails.push_back(Tail(bucket.shapes.back(), k));
  }
  const int segment = position < positions_ ? segment_at_[position] : 0;
  if (position && position < positions_ && segments_[segment].begin == position) {
    const auto& behind = behind_narrow_[segment];
    for (int i = 0; i < bucket.slots; ++i) {
      const auto known = behind.find(uint64_t(key[0] & (kFlagSets - 1)) << 32 | key[1 + i]);
      for (int k = 0; k < criteria_ && known != behind.end(); ++k) {
        double& tail = bucket.tails[i * criteria_ + k];
        tail = std::max(tail, known->second[k]);
      }
    }
  }
  const auto [lifts, unknown] = lifts_[position].try_emplace(bucket.shapes);
  if (unknown) MakeLifts(position, bucket, lifts->second);
  bucket.lifts = &lifts->second;
  return bucket;
}

void LabelSearch::MakeLifts(int position, const Bucket& bucket, std::vector<Lift>& lifts) {
  const int slots = bucket.slots, first_slot = resources_ + 1;
  const auto begins = [&](int u, int but) {  // lower bounds of the begin at `u`, by slot, without slot `but`
    std::vector<std::pair<int, double>> waits;
    for (int j = 0; j < slots; ++j) {
      const double way = j == but ? kNever : Way(bucket.shapes[j], u);
      if (IsTime(way)) waits.emplace_back(first_slot + j, way);
    }
    return waits;
  };
  for (int i = 0; i < slots; ++i) {
    Lift lift{first_slot + i, {}};
    bool always = true;
    for (int s = bucket.shapes[i]; s && always; s = live_.Shape(s).next) {
      lift.maxima.push_back(begins(live_.Shape(s).position, i));
      always = !lift.maxima.back().empty();
    }
    if (always && bucket.shapes[i]) lifts.push_back(std::move(lift));
    // Stored but no longer read: its time does not matter.
    if (!bucket.shapes[i]) lifts.push_back({first_slot + i, {}});
  }
  for (int r = 0; r < resources_; ++r) {
    Lift lift{r, {}};
    std::vector<int> first;  // positions that may use it next, of which none is later than another in all cases
    for (int u = position; u < positions_; ++u) {
      if (!uses_[u][r]) continue;
      const auto later = [&](int v) {
        for (int j = 0; j < slots; ++j) {
          if (Way(bucket.shapes[j], u) < Way(bucket.shapes[j], v)) return false;
        }
        return true;
      };
      if (std::any_of(first.begin(), first.end(), later)) continue;
      first.push_back(u);
      lift.maxima.push_back(begins(u, -1));
      if (lift.maxima.back().empty()) break;  // it may be used at once
    }
    if (lift.maxima.empty() || !lift.maxima.back().empty()) lifts.push_back(std::move(lift));
  }
}

void LabelSearch::Raise(const Bucket& bucket, double* row) const {
  for (const Lift& lift : *bucket.lifts) {
    if (lift.maxima.empty()) {
      row[lift.target] = 0;  // nothing waits for it any more
      continue;
    }
    double least = kInfinite;
    for (const auto& maximum : lift.maxima) {
      double most = kNever;
      for (const auto& [entry, ns] : maximum) most = std::max(most, row[entry] + ns);
      if ((least = std::min(least, most)) <= row[lift.target]) break;
    }
    row[lift.target] = std::max(row[lift.target], least);
  }
}

/*! \brief Whether every completion of `y` has one of `x` that is as good; `nearly`: within the tolerances. */
bool LabelSearch::Dominates(const Bucket& bucket, const double* x, const double* y, bool nearly) const {
  const double *own = x + bucket.width - criteria_, *others = y + bucket.width - criteria_;
  double spare_ns = kInfinite;  // how much later it may be
  for (int k = 0; k < criteria_; ++k) {
    const Criterion& criterion = question_.criteria[k];
    const double gap = others[k] - own[k] + (nearly ? criterion.tolerance : 0);
    if (criterion.per_ns) {
      spare_ns = std::min(spare_ns, gap / criterion.per_ns);
    } else if (gap < 0) {
      return false;
    }
  }
  if (pools_ && adds_pools_ && !FitsAnyFuture(bucket.position, own - pools_)) {
    for (int m = 1; m <= pools_; ++m) {
      if (own[-m] > others[-m]) return false;
    }
  }
  if (spare_ns >= kInfinite) return true;
  const int times = resources_ + 1 + bucket.slots;
  double later_ns = kNever;
  for (int i = 0; i < times; ++i) {
    if ((later_ns = std::max(later_ns, x[i] - y[i])) > spare_ns) return false;
  }
  if (problem_.launches_ahead) {
    const double *hidden = x + times, *others_hidden = y + times;
    for (int r = 0; r < resources_; ++r) {
      later_ns += std::max({0.0, others_hidden[r] - hidden[r], others_hidden[resources_ + r] - hidden[resources_ + r]});
    }
  }
  return later_ns <= spare_ns;
}

void LabelSearch::Offer(int position, Bucket& bucket, double* row, const Origin& origin) {
  Raise(bucket, row);
  for (int k = 0; k < criteria_; ++k) {
    const double at_most = question_.criteria[k].at_most;
    if (at_most < kInfinite && LowerBound(position, bucket, row, k) > at_most) return;
  }
  bucket.rows.insert(bucket.rows.end(), row, row + bucket.width);
  bucket.origins.push_back(origin);
  if (bucket.origins.size() > 2 * bucket.filtered + kUnfilteredLabels) Filter(bucket);
  if (++offered_[position] > kOffersByLabel * size_t(question_.max_labels)) KeepToMemory(position);
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
double LabelSearch::Worth(const Bucket& bucket, const double* row) const {
  const int times = resources_ + 1 + bucket.slots;
  const double* sums = row + bucket.width - criteria_;
  if (!criteria_) return std::accumulate(sums - pools_, sums, 0.0);
  const double mean_ns = std::accumulate(row, row + times, 0.0) / times;
  double worth = 0;
  for (int k = 0; k < criteria_; ++k) worth += question_.criteria[k].per_ns * mean_ns + sums[k];
  return worth;
}

/*! \brief Drop the labels of a bucket that another dominates. */
void LabelSearch::Filter(Bucket& bucket) {
  const size_t count = bucket.origins.size(), width = bucket.width;
  if (count == bucket.filtered) return;
  std::vector<double> worth;
  for (size_t l = 0; l < count; ++l) worth.push_back(Worth(bucket, &bucket.rows[l * width]));
  std::vector<int> order(count), chosen, front;
  std::iota(order.begin(), order.end(), 0);
  std::stable_sort(order.begin(), order.end(), [&](int a, int b) { return worth[a] < worth[b]; });
  size_t compared = 0;
  bool is_late = false;  // then all remaining labels are kept
  for (int l : order) {
    const double* row = &bucket.rows[l * width];
    const bool nearly = size_t(l) >= bucket.filtered;  // else tolerances would add up at one position
    bool dominated = false;
    if (!is_late && ++compared % kLabelsByClock == 0) is_late = IsLate();
    for (size_t i = 0; i < front.size() && !dominated && !is_late; ++i) {
      if (!nearly && size_t(front[i]) < bucket.filtered) continue;  // were compared earlier
      if (!Dominates(bucket, &bucket.rows[front[i] * width], row, nearly)) continue;
      dominated = true;
      std::swap(front[i], front[i / 2]);  // those that dominate many come first
    }
    if (!dominated) front.push_back(l), chosen.push_back(l);
  }
  std::vector<char> keeps(count);
  for (int l : chosen) keeps[l] = 1;
  Keep(bucket, keeps);
  bucket.filtered = chosen.size();
}

/*! \brief Keep some labels of a bucket, in their order. */
void LabelSearch::Keep(Bucket& bucket, const std::vector<char>& keeps) const {
  size_t next = 0, filtered = 0;
  for (size_t l = 0; l < keeps.size(); ++l) {
    if (!keeps[l]) continue;
    filtered += l < bucket.filtered;
    MoveLabel(bucket, l, next++);
  }
  Truncate(bucket, next);
  bucket.filtered = filtered;
}

// ---- Transitions

/*! \brief The transition of a bucket's state by `group`; false if the group is impossible in this state. */
bool LabelSearch::MeetGroup(const Bucket& bucket, const Group& group, Step& step) {
  for (int i = 0; i < bucket.slots; ++i) {
    const LiveResult& result = live_[bucket.key[1 + i]];
    if (result.position != group.begin || result.by_group.empty()) continue;
    const Access& access = result.by_group[group.number];
    if (access.reads && !access.possible) return false;
  }
  step = Step{};
  step.move_ns = group.move_ns, step.move_pj = group.move_pj;
  step.late = group.has_late;
  std::vector<std::pair<ResultId, int>> slots;
  struct Shared { double bytes; bool before, behind; };
  std::map<std::pair<int, int>, Shared> shared;  // by set and alias, what is stored once
  const auto store = [&](int set, int alias, double bytes, bool before, bool behind) {
    if (alias < 0) {
      (before ? behind ? step.always : step.read : step.written)[set] += bytes;
      return;
    }
    Shared& entry = shared.try_emplace({set, alias}, Shared{0, false, false}).first->second;
    entry.bytes = std::max(entry.bytes, bytes);
    entry.before |= before, entry.behind |= behind;
  };
  for (int i = 0; i < bucket.slots; ++i) {
    ResultId id = bucket.key[1 + i];
    const LiveResult& result = live_[id];
    const Access* access = nullptr;
    if (result.position == group.begin && !result.by_group.empty() && result.by_group[group.number].reads) {
      access = &result.by_group[group.number];
    }
    if (access) step.move_ns += access->ns, step.move_pj += access->pj;
    const bool taken = access && result.deferral && access->deferred >= 0;
    if (pools_) {
      const bool dead = result.live_end <= group.begin;
      if (result.is_added ? dead : !dead && result.bytes > 0) {
        store(result.set, result.alias, result.bytes, true, dead || result.live_end > group.end);
      }
      const double bytes = result.deferral ? problem_.regions[result.region].tensor_bytes : 0;
      if (taken && group.accepts_deferred && problem_.regions[result.region].is_shared) step.always[result.set] += bytes;
      if (result.deferral == kPartialSum) step.always[result.set] += bytes;
      if (access && access->copied) {
        const Operand& operand = group.operands[access->operand];
        step.copies.emplace_back(operand.order, result.set, problem_.regions[operand.region].tensor_bytes,
                                 operand.copy_outlives);
      }
      if (group.defers && access && access->added >= 0) {
        const auto& readers = problem_.regions[group.end - 1].readers;
        if (!readers.empty() && result.live_end <= readers.front()) {
          slots.emplace_back(live_.Added(access->added, result.set, readers.front()), i);
        }
      }
    }
    if (taken) {
      step.deferred |= 1u << access->deferred;
      if (access->late) step.late = false;
    }
    id = live_.At(access && access->is_result ? live_[bucket.key[1 + i]].next_if_done : id, group.end);
    if (id) slots.emplace_back(id, i);
  }
  for (int n = group.begin; n < group.end; ++n) {
    const bool last = n + 1 == group.end;
    const Deferral deferral = last ? DeferralBehind(group) : kDone;
    const Region& region = problem_.regions[n];
    const int layout = last ? group.layout : 0;
    const bool inside = group.fuses && !last && region.live_end <= group.end;
    if (pools_ && region.live_end > n && region.stored_bytes[layout] > 0 && !inside) {
      const int set = question_.only_gpu ? 0 : region.layout_set[layout];
      store(set, region.alias, region.stored_bytes[layout], false, region.live_end > group.end);
    }
    const ResultId id = live_.At(live_.Of(n, layout, deferral), group.end);
    if (id) slots.emplace_back(id, -1);
  }
  const auto& readers = problem_.regions[group.end - 1].readers;
  for (int n : group.inner_added) {
    if (!pools_ || readers.empty() || problem_.regions[n].live_end > readers.front()) continue;
    const int set = question_.only_gpu ? 0 : problem_.regions[n].layout_set[0];
    slots.emplace_back(live_.Added(n, set, readers.front()), -1);
  }
  for (const auto& [place, entry] : shared) {
    (entry.before ? entry.behind ? step.always : step.read : step.written)[place.first] += entry.bytes;
  }
  if (pools_) {
    for (const auto& [order, bytes] : group.input_copies) step.copies.emplace_back(order, 0, bytes, false);
    std::sort(step.copies.begin(), step.copies.end());
  }
  std::sort(slots.begin(), slots.end());
  const uint32_t flags = FlagsBehind(group, bucket.key[0]);
  step.key.push_back(group.end < positions_ ? flags : flags & kUsedPlainMemory);
  for (const auto& [id, from] : slots) step.key.push_back(id), step.from.push_back(from);
  return true;
}

void LabelSearch::Expand(int position, const Bucket& bucket) {
  const uint32_t flags = bucket.key[0];
  Step step;
  for (const Group& group : problem_.groups[position]) {
    const bool fits = group.possible && uint32_t(group.resumes) == flags >> kOpensShift &&
                      !(group.end == positions_ && group.opens);
    if (!fits || !MeetGroup(bucket, group, step)) continue;
    Context context = ContextOf(group, flags, step.deferred);
    if (problem_.launches_ahead) {
      context.follows = (position == 0 || flags & kAwaited) && group.MayFollow(step.deferred);
    }
    const std::vector<Expanded>& expanded = ExpandedIn(group, context).candidates;
    Bucket* targets[4] = {nullptr, nullptr, nullptr, nullptr};
    for (size_t l = 0; l < bucket.origins.size(); ++l) {
      ExpandLabel(position, bucket, l, group, step, expanded, context.follows, targets);
    }
  }
}

void LabelSearch::ExpandLabel(int position, const Bucket& bucket, size_t label, const Group& group, const Step& step,
                              const std::vector<Expanded>& expanded, bool follows, Bucket** targets) {
  const double* x = &bucket.rows[label * bucket.width];
  const double *ready = x + resources_ + 1, *hidden = ready + bucket.slots, *sums = x + bucket.width - criteria_;
  double begin_ns = 0, late_ns = 0, free_ns[kMaxResources], moved_free_ns[kMaxResources], launches_ns[kMaxTasks];
  for (int i = 0; i < bucket.slots; ++i) {
    const LiveResult& result = live_[bucket.key[1 + i]];
    if (result.position != position || result.by_group.empty() || !result.by_group[group.number].reads) continue;
    double& waits_ns = step.late && result.by_group[group.number].late ? late_ns : begin_ns;
    waits_ns = std::max(waits_ns, ready[i]);
  }
  late_ns = std::max(late_ns, begin_ns);
  std::copy_n(x, resources_, moved_free_ns);
  if (step.move_ns > 0) {
    begin_ns = std::max(begin_ns, moved_free_ns[group.move_resource]) + step.move_ns;
    moved_free_ns[group.move_resource] = begin_ns;
  }
  for (const Expanded& e : expanded) {
    std::copy_n(moved_free_ns, resources_, free_ns);
    if (problem_.launches_ahead) {
      for (size_t i = 0; i < e.tasks.size(); ++i) launches_ns[i] = e.tasks[i].launch_ns;
      for (const auto& [i, own_ns] : e.first) {
        const double before_ns = hidden[(follows ? resources_ : 0) + e.tasks[i].resource];
        launches_ns[i] = std::max(launches_ns[i] - (before_ns + own_ns), 0.0);
      }
    }
    const double end_ns =
        std::max(late_ns, Execute(e.tasks, begin_ns, free_ns, problem_.launches_ahead ? launches_ns : nullptr));
    const bool awaited = problem_.launches_ahead && e.awaited && step.key[0] & kAwaited;
    const bool uses_plain = capacity_ && problem_.candidates[e.candidate].plain_memory;
    Bucket*& target = targets[awaited + 2 * uses_plain];
    if (!target) {
      Key key = step.key;
      if (!awaited) key[0] &= ~kAwaited;
      if (uses_plain) key[0] |= kUsedPlainMemory;
      target = &BucketAt(group.end, key);
    }
    row_.assign(free_ns, free_ns + resources_);
    double sink_ns = x[resources_];
    for (int n = position; n < group.end; ++n) {
      if (problem_.regions[n].readers.empty()) sink_ns = std::max(sink_ns, end_ns);
    }
    row_.push_back(sink_ns);
    for (int i : step.from) row_.push_back(i < 0 ? end_ns : ready[i]);
    // Times of equal results are sorted.
    double* slots_ns = &row_[resources_ + 1];
    for (size_t i = 1; i < step.from.size(); ++i) {
      for (size_t j = i; j && step.key[j] == step.key[j + 1] && slots_ns[j - 1] > slots_ns[j]; --j) {
        std::swap(slots_ns[j - 1], slots_ns[j]);
      }
    }
    if (problem_.launches_ahead) {
      double own_ns[kMaxResources], behind_ns[kMaxResources];
      for (int r = 0; r < resources_; ++r) {
        const Queue& queue = e.queues[r];
        const double before_ns = follows ? hidden[resources_ + r] + e.executing_ns : hidden[r];
        own_ns[r] = std::min(queue.used ? queue.own_ns : hidden[r], problem_.longest_launch_ns[r]);
        behind_ns[r] = std::min(queue.used ? queue.behind_ns : before_ns, problem_.longest_launch_ns[r]);
        if (!awaited) behind_ns[r] = own_ns[r];
      }
      row_.insert(row_.end(), own_ns, own_ns + resources_);
      row_.insert(row_.end(), behind_ns, behind_ns + resources_);
    }
    if (pools_ && !AppendPeaks(group, step, e, sums - pools_, target->key, sums, row_)) continue;
    for (int k = 0; k < criteria_; ++k) {
      row_.push_back(sums[k] + e.sums[k] + question_.criteria[k].per_pj * step.move_pj);
    }
    Offer(group.end, *target, row_.data(), {bucket.origins[label].trace, e.candidate});
  }
}

/*! \brief Append the peak of each pool after the candidate; false if the peaks exceed their bounds. */
bool LabelSearch::AppendPeaks(const Group& group, const Step& step, const Expanded& expanded, const double* peaks,
                              const Key& key, const double* sums, std::vector<double>& row) const {
  const int result_set = question_.only_gpu ? 0 : problem_.regions[group.end - 1].layout_set[group.layout];
  double pool_bytes = 0;
  for (int set = 0; set < kChannelSets; ++set) {
    double peak = peaks[set], copied = 0;
    for (const auto& [order, copy_set, bytes, outlives] : step.copies) {
      if (copy_set != set) continue;
      peak = std::max(peak, step.always[set] + step.read[set] + copied + bytes);
      if (outlives) copied += bytes;
    }
    for (const Moment& moment : problem_.candidates[expanded.candidate].moments) {
      const double own = set == result_set ? moment.own_bytes : 0;
      peak = std::max(peak, step.always[set] + (moment.reads ? step.read[set] : 0) +
                                (moment.writes ? step.written[set] : 0) + own + copied);
    }
    if (!adds_pools_ && peak > pool_most_[set]) return false;
    row.push_back(peak);
    pool_bytes += peak;
  }
  if (capacity_ && key[0] & kUsedPlainMemory) {  // the last criterion counts rows and filters
    const double held = sums[criteria_ - 1] + expanded.sums[criteria_ - 1];
    if (held + pool_bytes > question_.capacity_bytes) return false;
  }
  return !adds_pools_ || pool_bytes <= question_.max_memory_bytes;
}

size_t LabelSearch::CountLabels(int position) const {
  const auto& buckets = buckets_[position];
  return std::accumulate(buckets.begin(), buckets.end(), size_t{0},
                         [](size_t sum, const Bucket& bucket) { return sum + bucket.origins.size(); });
}

/*! \brief Keep `limit` labels of a position, those of the smallest lower bounds. */
void LabelSearch::KeepBest(int position, std::vector<Place>& order, size_t limit) {
  auto& buckets = buckets_[position];
  std::nth_element(order.begin(), order.begin() + limit, order.end());
  lost_ = std::min(lost_, std::get<0>(*std::min_element(order.begin() + limit, order.end())));
  order.resize(limit);
  std::vector<std::vector<char>> keeps;
  for (const Bucket& bucket : buckets) keeps.emplace_back(bucket.origins.size(), 0);
  for (const auto& [value, b, l] : order) keeps[b][l] = 1;
  for (size_t b = 0; b < buckets.size(); ++b) Keep(buckets[b], keeps[b]);
}

/*! \brief Limit the labels at a position to what fits memory. */
void LabelSearch::KeepToMemory(int position) {
  const auto limit = static_cast<size_t>(question_.max_labels);
  offered_[position] = CountLabels(position);
  if (offered_[position] <= 2 * limit) return;
  std::vector<Place> order;
  for (size_t b = 0; b < buckets_[position].size(); ++b) {
    const Bucket& bucket = buckets_[position][b];
    if (position == positions_) return;  // complete plans: there are few
    const StrongBounds weak = WeakBounds(position, bucket);
    for (size_t l = 0; l < bucket.origins.size(); ++l) {
      order.emplace_back(LowerValue(position, bucket, weak, &bucket.rows[l * bucket.width]), b, l);
    }
  }
  KeepBest(position, order, limit);
  offered_[position] = limit;
}

/*! \brief Filter the labels of a position before they are expanded; by stronger bounds if there are many. */
void LabelSearch::Arrive(int position, int64_t beam) {
  auto& buckets = buckets_[position];
  const size_t limit = size_t(beam ? std::min(beam, question_.max_labels) : question_.max_labels);
  const bool strongly = CountLabels(position) > std::min(limit, kManyLabels) && position < positions_;
  std::vector<Place> order;
  for (size_t b = 0; b < buckets.size(); ++b) {
    Bucket& bucket = buckets[b];
    if (!strongly) {
      Filter(bucket);
      continue;
    }
    if (bucket.origins.empty()) continue;
    const StrongBounds strong = IsLate() ? WeakBounds(position, bucket) : Strong(position, bucket.key);
    const size_t width = bucket.width;
    std::vector<char> keeps(bucket.origins.size(), 1);
    for (size_t l = 0; l < keeps.size(); ++l) {
      for (int k = 0; k < criteria_ && keeps[l]; ++k) {
        const double at_most = question_.criteria[k].at_most;
        keeps[l] = at_most >= kInfinite || LowerBound(position, bucket, strong, &bucket.rows[l * width], k) <= at_most;
      }
    }
    Keep(bucket, keeps);
    Filter(bucket);
    for (size_t l = 0; l < bucket.origins.size(); ++l) {
      order.emplace_back(LowerValue(position, bucket, strong, &bucket.rows[l * width]), b, l);
    }
  }
  if (order.size() > limit) KeepBest(position, order, limit);
  for (Bucket& bucket : buckets) {
    for (Origin& origin : bucket.origins) {
      traces_.push_back({origin.trace, origin.candidate});
      origin.trace = static_cast<int>(traces_.size()) - 1;
    }
  }
  const int64_t count = static_cast<int64_t>(CountLabels(position));
  result_.labels += count;
  result_.most_labels = std::max(result_.most_labels, count);
}

/*! \brief Drop all labels of a bucket. */
void LabelSearch::Drop(int position, const Bucket& bucket) {
  const StrongBounds weak = WeakBounds(position, bucket);
  for (size_t l = 0; l < bucket.origins.size(); ++l) {
    lost_ = std::min(lost_, LowerValue(position, bucket, weak, &bucket.rows[l * bucket.width]));
  }
}

Solution LabelSearch::SolutionOf(const Bucket& bucket, size_t label) const {
  const double *row = &bucket.rows[label * bucket.width], *sums = row + bucket.width - criteria_;
  const double latency_ns = question_.CountsTime() ? row[resources_] : std::nan("");  // times may not be computed
  Solution solution{latency_ns, std::accumulate(sums - pools_, sums, 0.0), {}, {}, {}};
  std::copy(sums - pools_, sums, solution.peaks.begin());
  for (int k = 0; k < criteria_; ++k) {
    solution.values.push_back(question_.criteria[k].per_ns * row[resources_] + sums[k]);
  }
  for (int t = bucket.origins[label].trace; traces_[t].previous >= 0; t = traces_[t].previous) {
    solution.candidates.push_back(traces_[t].candidate);
  }
  std::reverse(solution.candidates.begin(), solution.candidates.end());
  return solution;
}

std::optional<Result> LabelSearch::RunWhole(int64_t limit) {
  ends_at_loss_ = true;
  Result result = Run(limit, false);
  ends_at_loss_ = false;
  return lost_ < kInfinite ? std::nullopt : std::optional<Result>(std::move(result));
}

Result LabelSearch::Run(int64_t beam, bool plan_is_known) {
  index_.assign(positions_ + 1, {});
  buckets_.clear();
  buckets_.resize(positions_ + 1);
  lifts_.assign(positions_ + 1, {});
  offered_.assign(positions_ + 1, 0);
  traces_.clear();
  lost_ = kInfinite;
  result_ = Result{};
  Bucket& begin = BucketAt(0, Key(1, problem_.launches_ahead ? kAwaited : 0));
  begin.rows.assign(begin.width, 0);
  begin.origins.push_back({-1, -1});
  for (int p = 0; p < positions_; ++p) {
    if (IsLate()) beam = plan_is_known ? 1 : beam ? std::min(beam, kHastyBeam) : kHastyBeam;
    Arrive(p, beam);
    if (ends_at_loss_ && lost_ < kInfinite) return {};
    for (size_t b = 0; b < buckets_[p].size(); ++b) {
      poll_();
      if (plan_is_known && IsLate()) {  // only the bound is needed
        Drop(p, buckets_[p][b]);
        continue;
      }
      const Bucket bucket = std::move(buckets_[p][b]);
      Expand(p, bucket);
    }
    buckets_[p].clear();
    index_[p].clear();
    lifts_[p].clear();
  }
  Arrive(positions_, 0);
  for (const Bucket& bucket : buckets_[positions_]) {
    for (size_t l = 0; l < bucket.origins.size(); ++l) result_.solutions.push_back(SolutionOf(bucket, l));
  }
  auto& all = result_.solutions;
  std::stable_sort(all.begin(), all.end(),
                   [&](const Solution& a, const Solution& b) { return Value(a) < Value(b); });
  result_.dropped = lost_;
  result_.bound = std::min(lost_, all.empty() ? kInfinite : Value(all[0]));
  return std::move(result_);
}

}  // namespace placement
}  // namespace pimflow
