/*!
 * \file bounds.cc
 * \brief Lower bounds of a label's values at the end of the network.
 *
 * Three bounds: chains of results (`Tail`), the load of every mix of resources, and both combined over the regions up
 * to the next narrow position (`Strong`), after which all work waits for one result.
 */
#include <algorithm>
#include <numeric>

#include "label_search.h"

namespace pimflow {
namespace placement {
namespace {

constexpr int kMixParts = 8;  // weights of a mix of resources are multiples of 1/8
constexpr size_t kSegmentMixes = 6;  // mixes with the best bounds, which are used in a segment
constexpr int kHorizon = 32;  // positions that `Strong` looks ahead

}  // namespace

void LabelSearch::MakeMixes(std::vector<int>& parts, int resource, int left) {
  if (resource + 1 < resources_) {
    for (parts[resource] = 0; parts[resource] <= left; ++parts[resource]) {
      MakeMixes(parts, resource + 1, left - parts[resource]);
    }
    return;
  }
  parts[resource] = left;
  mixes_.emplace_back();
  for (int part : parts) mixes_.back().push_back(double(part) / kMixParts);
}

void LabelSearch::PrepareBounds() {
  int groups = 0;
  straddled_.assign(positions_ + 1, 0);
  may_continue_.assign(positions_ + 1, 0);
  may_follow_.assign(positions_ + 1, 0);
  for (const auto& at : problem_.groups) {
    groups += static_cast<int>(at.size());
    for (const Group& group : at) {
      for (int q = group.begin + 1; q < group.end; ++q) straddled_[q] = 1;
      may_continue_[group.begin] |= group.continues;
      may_follow_[group.begin] |= group.reads_previous;
    }
  }
  expanded_.resize(groups);
  // Every candidate in its cheapest context: no deferred epilogues, and all launches hidden that may be.
  const auto least = [&](const Group& group) -> const Expansion& {
    return ExpandedIn(group, {0, group.continues, false, false});
  };
  least_ns_.assign(groups, kInfinite);
  for (const auto& at : problem_.groups) {
    for (const Group& group : at) {
      for (const Expanded& e : least(group).candidates) {
        least_ns_[group.id] = std::min(least_ns_[group.id], e.least_ns);
      }
    }
  }
  rest_.assign(criteria_, std::vector<double>(positions_ + 1, 0));
  weights_.assign(criteria_, std::vector<double>(groups, kInfinite));
  for (int k = 0; k < criteria_; ++k) {
    for (int p = positions_ - 1; p >= 0; --p) {
      rest_[k][p] = kInfinite;
      for (const Group& group : problem_.groups[p]) {
        for (const Expanded& e : least(group).candidates) {
          rest_[k][p] = std::min(rest_[k][p], e.sums[k] + rest_[k][group.end]);
        }
      }
    }
    for (const auto& at : problem_.groups) {
      for (const Group& group : at) {
        if (rest_[k][group.end] >= kInfinite) continue;  // no plan contains it
        weights_[k][group.id] = least(group).weights[k] + rest_[k][group.end] - rest_[k][group.begin];
      }
    }
  }
  uses_.assign(positions_, std::vector<char>(resources_));
  for (int q = 0; q < positions_; ++q) {
    for (const Group& group : problem_.groups[q]) {
      if (group.move_resource >= 0) uses_[q][group.move_resource] = 1;
      for (int task : group.transitions) {
        if (task >= 0) MarkUses(problem_.transitions[task], uses_[q]);
      }
      if (group.needs_mode && problem_.switch_task >= 0) MarkUses(problem_.transitions[problem_.switch_task], uses_[q]);
      for (int candidate : group.candidates) {
        for (const Task& task : problem_.candidates[candidate].tasks) MarkUses(task, uses_[q]);
      }
    }
  }
  if (pools_) PrepareFuturePeaks();
  ways_.resize(live_.shapes());
  tails_.assign(criteria_, std::vector<double>(live_.shapes(), -1));
  for (int n = positions_ - 1; n >= 0; --n) {  // from the last on: the recursion stays flat
    for (int k = 0; k < criteria_; ++k) Tail(live_.ShapeOf(n), k);
  }
  int begin = 0;
  for (int e = 0; e < positions_; ++e) {
    bool narrow = !straddled_[e] && !straddled_[e + 1];
    for (int n = 0; n < e && narrow; ++n) narrow = IsTime(Way(live_.ShapeOf(n), e));
    for (int u = e + 1; u < positions_ && narrow; ++u) narrow = IsTime(Way(live_.ShapeOf(e), u));
    segment_at_.push_back(static_cast<int>(segments_.size()));
    if (!narrow && e + 1 < positions_) continue;
    segments_.push_back({begin, e + 1, {}});
    begin = e + 1;
  }
  std::vector<int> parts(resources_);
  MakeMixes(parts, 0, kMixParts);
  loads_.assign(criteria_, std::vector<std::vector<double>>(positions_ + 1));
  behind_group_.assign(criteria_, std::vector<double>(groups * kFlagSets, 0));
  behind_narrow_.resize(segments_.size());
  for (int s = static_cast<int>(segments_.size()) - 1; s >= 0; --s) PrepareSegment(s);
}

/*! \brief A lower bound of the load of a group's candidates on a mix of resources. */
double LabelSearch::Work(const Expansion& expansion, int k, const std::vector<double>& mix) const {
  const double per_ns = question_.criteria[k].per_ns;
  double least = kInfinite;
  for (const Expanded& e : expansion.candidates) {
    double sum = e.sums[k];
    for (const Task& task : e.tasks) {
      // A launch that may hide takes no time; `least_ns` is of the same tasks.
      sum += per_ns * mix[task.resource] * (task.execution_ns + task.launch_ns);
      for (int r = 0; r < resources_; ++r) {
        if (task.also >> r & 1 && r != task.resource) sum += per_ns * mix[r] * task.execution_ns;
      }
    }
    for (const auto& first : e.first) {
      const Task& task = e.tasks[first.first];
      sum -= per_ns * mix[task.resource] * task.launch_ns;
    }
    least = std::min(least, sum);
  }
  return least;
}

/*! \brief Choose mixes of resources for a segment, and bound what follows from each position in it. */
void LabelSearch::PrepareSegment(int s) {
  Segment& segment = segments_[s];
  const int begin = segment.begin, end = segment.end, narrow = end - 1;
  const auto groups_at = [&](int p) -> const std::vector<Group>& { return problem_.groups[p]; };
  const auto key_behind = [&](const Group& group, uint32_t flags) {
    const Deferral deferral = DeferralBehind(group);
    const ResultId id = live_.At(live_.Of(group.end - 1, group.layout, deferral), group.end);
    Key key{FlagsBehind(group, flags) & (kFlagSets - 1)};
    if (id) key.push_back(id);
    return key;
  };
  const auto map_key = [](const Key& key) { return uint64_t(key[0]) << 32 | (key.size() > 1 ? key[1] : 0); };
  segment.mixes.resize(criteria_);
  for (int k = 0; k < criteria_; ++k) {
    const auto saved = [&](const Group& group) { return rest_[k][group.end] - rest_[k][group.begin]; };
    const auto leads_on = [&](const Group& group) { return rest_[k][group.end] < kInfinite; };
    std::vector<std::pair<double, int>> order;
    std::vector<double> load(end - begin + 1);
    for (size_t m = 0; m < mixes_.size(); ++m) {
      load[end - begin] = 0;
      for (int u = end - 1; u >= begin; --u) {
        load[u - begin] = kInfinite;
        for (const Group& group : groups_at(u)) {
          if (!leads_on(group)) continue;
          const double work = Work(expanded_[group.id].front(), k, mixes_[m]);
          load[u - begin] = std::min(load[u - begin], work + saved(group) + load[group.end - begin]);
        }
      }
      order.emplace_back(-load[0], static_cast<int>(m));
    }
    std::sort(order.begin(), order.end());
    for (size_t i = 0; i < order.size() && i < kSegmentMixes; ++i) segment.mixes[k].push_back(order[i].second);
  }
  for (int u = begin; u < end; ++u) {
    for (const Group& group : groups_at(u)) {
      for (Expansion& expansion : expanded_[group.id]) FindWork(group, expansion);
    }
  }
  if (end < positions_) {
    for (const Group& group : groups_at(narrow)) {
      for (uint32_t flags = 0; flags < kFlagSets; ++flags) {
        const auto& behind = behind_narrow_[s + 1].at(map_key(key_behind(group, flags)));
        for (int k = 0; k < criteria_; ++k) behind_group_[k][group.id * kFlagSets + flags] = behind[k];
      }
    }
  }
  for (int k = 0; k < criteria_; ++k) {
    const size_t mixes = segment.mixes[k].size();
    for (int u = end - 1; u >= begin; --u) {
      std::vector<double>& loads = loads_[k][u];
      loads.assign(mixes, kInfinite);
      for (const Group& group : groups_at(u)) {
        if (rest_[k][group.end] >= kInfinite) continue;
        const double saved = rest_[k][group.end] - rest_[k][group.begin];
        const double* behind = &behind_group_[k][group.id * kFlagSets];
        const double last = *std::min_element(behind, behind + kFlagSets);
        for (size_t i = 0; i < mixes; ++i) {
          const double work = Work(expanded_[group.id].front(), k, mixes_[segment.mixes[k][i]]);
          loads[i] = std::min(loads[i], work + saved + (group.end == end ? last : loads_[k][group.end][i]));
        }
      }
    }
  }
  if (!begin) return;
  for (const Group& group : groups_at(begin - 1)) {
    for (uint32_t flags = 0; flags < kFlagSets; ++flags) {
      const Key key = key_behind(group, flags);
      auto [at, fresh] = behind_narrow_[s].try_emplace(map_key(key));
      if (!fresh) continue;
      const StrongBounds strong = Strong(begin, key);
      for (int k = 0; k < criteria_; ++k) {
        double least = key.size() > 1 ? strong.tails[k][0] : 0;
        for (double load : strong.loads[k]) least = std::max(least, load);
        at->second.push_back(least);
      }
    }
  }
}

/*! \brief Lower bounds of an expansion of a group, by criterion and mix of the segment. */
void LabelSearch::FindWork(const Group& group, Expansion& expansion) const {
  const Segment& segment = segments_[segment_at_[group.begin]];
  expansion.work.clear();
  for (int k = 0; k < criteria_; ++k) {
    for (int m : segment.mixes[k]) expansion.work.push_back(Work(expansion, k, mixes_[m]));
  }
}

/*! \brief By position, upper bounds of the later peaks in each set of channels, whatever the layouts of results. */
void LabelSearch::PrepareFuturePeaks() {
  std::vector<int> needed_end;  // by region, until when it may be live: a deferred epilogue may add it late
  for (const Region& region : problem_.regions) needed_end.push_back(region.live_end);
  for (const auto& groups : problem_.groups) {
    for (const Group& group : groups) {
      const auto& readers = problem_.regions[group.end - 1].readers;
      if (!group.defers || readers.empty()) continue;
      for (const Operand& operand : group.operands) {
        int& end = needed_end[operand.region];
        if (operand.access.added >= 0) end = std::max(end, readers.front() + 1);
      }
      for (int n : group.inner_added) needed_end[n] = std::max(needed_end[n], readers.front() + 1);
    }
  }
  future_peaks_.assign(positions_ + 1, {});
  for (int p = positions_ - 1; p >= 0; --p) {
    auto& peaks = future_peaks_[p] = future_peaks_[p + 1];
    for (const Group& group : problem_.groups[p]) {
      std::array<double, kChannelSets> held{};
      const auto hold = [&](int n, double times_tensor) {
        const Region& region = problem_.regions[n];
        std::array<double, kChannelSets> most{};
        for (size_t l = 0; l < region.layout_set.size(); ++l) {
          double& set = most[question_.only_gpu ? 0 : region.layout_set[l]];
          set = std::max(set, region.stored_bytes[l] + times_tensor * region.tensor_bytes);
        }
        for (int set = 0; set < kChannelSets; ++set) held[set] += most[set];
      };
      for (int n = 0; n < group.end; ++n) {  // a partial sum, or a result that is finished for others too
        if (needed_end[n] > group.begin) hold(n, problem_.regions[n].may_defer ? 2 : 0);
      }
      for (const Operand& operand : group.operands) hold(operand.region, 1);  // as much as its copy
      for (const auto& copy : group.input_copies) held[0] += copy.second;
      double own_bytes = 0;
      for (int candidate : group.candidates) {
        for (const Moment& moment : problem_.candidates[candidate].moments) {
          own_bytes = std::max(own_bytes, moment.own_bytes);
        }
      }
      held[question_.only_gpu ? 0 : problem_.regions[group.end - 1].layout_set[group.layout]] += own_bytes;
      for (int set = 0; set < kChannelSets; ++set) peaks[set] = std::max(peaks[set], held[set]);
    }
  }
}

/*! \brief Whether every plan with these peaks keeps to the bound on memory, whatever follows. */
bool LabelSearch::FitsAnyFuture(int position, const double* peaks) const {
  if (question_.minimises_memory || capacity_) return false;
  double pool_bytes = 0;
  for (int set = 0; set < kChannelSets; ++set) {
    pool_bytes += std::max(peaks[set], future_peaks_[position][set]);
  }
  return pool_bytes <= question_.max_memory_bytes;
}

void LabelSearch::MarkUses(const Task& task, std::vector<char>& uses) const {
  for (int r = 0; r < resources_; ++r) {
    if (task.resource == r || task.also >> r & 1) uses[r] = 1;
  }
}

/*! \brief A lower bound of the time from a result to the groups at `position`; `kNever` if they do not wait for it. */
double LabelSearch::Way(int shape, int position) {
  if (!shape) return kNever;
  Ways& ways = ways_[shape];
  if (ways.begins_ns.empty()) FindWays(shape, ways);
  return position < ways.first ? kNever : ways.begins_ns[position - ways.first];
}

void LabelSearch::FindWays(int shape, Ways& ways) {
  ways.first = live_.Shape(shape).position;
  while (straddled_[ways.first]) --ways.first;  // groups that begin before the reader may contain it
  std::vector<double> ready_ns(positions_, kInfinite);
  std::fill(ready_ns.begin(), ready_ns.begin() + ways.first, kNever);
  for (int q = ways.first; q < positions_; ++q) {
    const ReadShape& read = live_.Shape(shape);
    double begin_ns = kInfinite;
    size_t next = 0;  // of the groups that read it
    for (const Group& group : problem_.groups[q]) {
      double starts_ns = kNever, ends_ns = kNever;
      for (const Operand& operand : group.operands) {
        double& waits_ns = operand.access.late ? ends_ns : starts_ns;
        waits_ns = std::max(waits_ns, ready_ns[operand.region]);
      }
      if (read.position == q && next < read.groups.size() && read.groups[next].first == group.number) {
        double& waits_ns = read.groups[next++].second ? ends_ns : starts_ns;
        waits_ns = std::max(waits_ns, 0.0);
      }
      begin_ns = std::min(begin_ns, starts_ns);
      if (IsTime(starts_ns)) ends_ns = std::max(ends_ns, starts_ns + least_ns_[group.id]);
      for (int n = q; n < group.end; ++n) ready_ns[n] = std::min(ready_ns[n], ends_ns);
    }
    ways.begins_ns.push_back(begin_ns);
    if (read.position == q) shape = read.next;
  }
}

/*! \brief A lower bound of a criterion, beyond `rest_`, from a result to the end of the network. */
double LabelSearch::Tail(int shape, int k) {
  if (!shape) return 0;
  if (tails_[k][shape] >= 0) return tails_[k][shape];
  const ReadShape& read = live_.Shape(shape);
  const double behind = Tail(read.next, k);
  double least = straddled_[read.position] ? behind : kInfinite;
  size_t next = 0;
  for (const Group& group : problem_.groups[read.position]) {
    const double own = Tail(live_.ShapeOf(group.end - 1), k);
    if (next < read.groups.size() && read.groups[next].first == group.number) {
      const bool late = read.groups[next++].second;
      least = std::min(least, std::max(behind, late ? own : own + weights_[k][group.id]));
    } else {
      least = std::min(least, behind);
    }
  }
  return tails_[k][shape] = std::max(least, 0.0);
}

/*! \brief The bounds of a bucket without looking ahead. */
LabelSearch::StrongBounds LabelSearch::WeakBounds(int position, const Bucket& bucket) const {
  StrongBounds weak;
  for (int k = 0; k < criteria_; ++k) {
    weak.tails.emplace_back();
    for (int i = 0; i < bucket.slots; ++i) weak.tails[k].push_back(bucket.tails[i * criteria_ + k]);
    weak.loads.push_back(loads_[k][position]);
  }
  return weak;
}

LabelSearch::StrongBounds LabelSearch::Strong(int position, const Key& key) {
  const Segment& segment = segments_[segment_at_[position]];
  const int slots = static_cast<int>(key.size()) - 1;
  const int until = std::min(segment.end, position + kHorizon), length = until - position;
  // By position, the results read there, and whether an epilogue is deferred for sure: the first reader may do it, and
  // then nothing remains for others.
  std::vector<std::vector<std::pair<const LiveResult*, bool>>> read(length);
  for (int i = 0; i < slots; ++i) {
    bool is_first = true;
    for (ResultId id = key[1 + i]; id && live_[id].position < until; id = live_[id].next) {
      if (live_[id].by_group.empty()) continue;
      read[live_[id].position - position].emplace_back(&live_[id], is_first && live_[id].deferral);
      is_first = false;
    }
  }
  const uint32_t first_flags = key[0] & (kFlagSets - 1);
  StrongBounds strong;
  size_t first_work = 0;
  for (int k = 0; k < criteria_; ++k) {
    const Criterion& criterion = question_.criteria[k];
    const size_t mixes = segment.mixes[k].size();
    // Lower bounds from a result; from the begin of a group, and from its late operands; loads by flags and mix.
    std::vector<double> behind(length, 0), begins(length, kInfinite), waits(length, kInfinite);
    std::vector<double> loads(length * kFlagSets * mixes, kInfinite);
    const auto loads_at = [&](int p, uint32_t flags) { return &loads[((p - position) * kFlagSets + flags) * mixes]; };
    const auto after = [&](int shape) {
      double most = 0;
      for (; shape && live_.Shape(shape).position < until; shape = live_.Shape(shape).next) {
        const ReadShape& at = live_.Shape(shape);
        if (straddled_[at.position] || at.groups.size() < problem_.groups[at.position].size()) continue;
        bool late = false;
        for (const auto& group : at.groups) late |= group.second;
        most = std::max(most, (late ? waits : begins)[at.position - position]);
      }
      return most;
    };
    for (int u = until - 1; u >= position; --u) {
      if (u + 1 < segment.end) behind[u - position] = after(live_.ShapeOf(u));
      for (const Group& group : problem_.groups[u]) {
        if (!group.possible || rest_[k][group.end] >= kInfinite) continue;
        double moved_ns = group.move_ns, moved_pj = group.move_pj;
        uint32_t deferred = 0;
        bool possible = true;
        for (const auto& [result, is_deferred] : read[u - position]) {
          const Access& access = result->by_group[group.number];
          if (!access.reads) continue;
          possible &= access.possible, moved_ns += access.ns, moved_pj += access.pj;
          if (is_deferred && access.deferred >= 0) deferred |= 1u << access.deferred;
        }
        if (!possible) continue;
        const double saved = rest_[k][group.end] - rest_[k][u] + criterion.per_pj * moved_pj;
        for (uint32_t flags = u == position ? first_flags : 0; flags < kFlagSets; ++flags) {
          const Expansion& expansion = ExpandedIn(group, ContextOf(group, flags, deferred));
          const bool ends = group.end == segment.end;
          const double last = ends ? behind_group_[k][group.id * kFlagSets + flags] : 0;
          const double own = ends               ? last
                             : group.end > until ? tails_[k][live_.ShapeOf(group.end - 1)]
                                                 : behind[group.end - 1 - position];
          if (!expansion.candidates.empty()) {
            begins[u - position] = std::min(
                begins[u - position], criterion.per_ns * moved_ns + expansion.weights[k] + saved + own);
            waits[u - position] = std::min(waits[u - position], own);
            const double* next = group.end < until ? loads_at(group.end, FlagsBehind(group, flags) % kFlagSets)
                                 : ends            ? nullptr
                                                   : loads_[k][group.end].data();
            double* load = loads_at(u, flags);
            for (size_t i = 0; i < mixes; ++i) {
              double sum = saved + expansion.work[first_work + i] + (next ? next[i] : last);
              if (group.move_resource >= 0) {
                sum += criterion.per_ns * moved_ns * mixes_[segment.mixes[k][i]][group.move_resource];
              }
              load[i] = std::min(load[i], sum);
            }
          }
          if (u == position) break;
        }
      }
    }
    strong.tails.emplace_back();
    for (int i = 0; i < slots; ++i) {
      const int shape = live_[key[1 + i]].shape;
      strong.tails[k].push_back(std::max(after(shape), Tail(shape, k)));
    }
    const double* load = loads_at(position, first_flags);
    strong.loads.emplace_back(load, load + mixes);
    first_work += mixes;
  }
  return strong;
}

double LabelSearch::LowerBound(int position, const Bucket& bucket, const double* row, int k) const {
  const double per_ns = question_.criteria[k].per_ns;
  double most = per_ns * row[resources_];
  for (int i = 0; i < bucket.slots; ++i) {
    most = std::max(most, per_ns * row[resources_ + 1 + i] + bucket.tails[i * criteria_ + k]);
  }
  return most + row[bucket.width - criteria_ + k] + rest_[k][position];
}

double LabelSearch::LowerBound(int position, const Bucket& bucket, const StrongBounds& strong, const double* row,
                               int k) const {
  const double per_ns = question_.criteria[k].per_ns;
  double most = per_ns * row[resources_];
  for (int i = 0; i < bucket.slots; ++i) most = std::max(most, per_ns * row[resources_ + 1 + i] + strong.tails[k][i]);
  const std::vector<int>& mixes = segments_[segment_at_[position]].mixes[k];
  for (size_t i = 0; i < mixes.size(); ++i) {
    double sum = strong.loads[k][i];
    for (int r = 0; r < resources_; ++r) sum += per_ns * mixes_[mixes[i]][r] * row[r];
    most = std::max(most, sum);
  }
  return most + row[bucket.width - criteria_ + k] + rest_[k][position];
}

double LabelSearch::LowerValue(int position, const Bucket& bucket, const StrongBounds& strong, const double* row) const {
  if (!question_.minimises_memory) return LowerBound(position, bucket, strong, row, 0);
  const double* peaks = row + bucket.width - criteria_ - pools_;
  return std::accumulate(peaks, peaks + pools_, 0.0);
}

}  // namespace placement
}  // namespace pimflow
