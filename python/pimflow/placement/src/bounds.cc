/*!
 * \file bounds.cc
 * \brief What a label takes at least until the end of the network.
 *
 * Three lower bounds: chains of results (`Tail`), the load of every mix of resources, and both over the regions up to
 * the next narrow position (`Strong`), behind which all work waits for one result.
 */
#include <algorithm>
#include <numeric>

#include "label_search.h"

namespace pimflow {
namespace placement {
namespace {

constexpr int kMixParts = 8;  // a mix of resources has weights of eighths

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
  for (const auto& at : problem_.groups) {
    groups += static_cast<int>(at.size());
    for (const Group& group : at) {
      for (int q = group.begin + 1; q < group.end; ++q) straddled_[q] = 1;
    }
  }
  std::vector<int> parts(resources_);
  MakeMixes(parts, 0, kMixParts);
  // Every candidate where it takes least: nothing before it to be done, and all launches hidden that may be.
  std::vector<std::vector<Expanded>> least(groups);
  std::vector<double> free_ns(resources_), launches_ns;
  least_ns_.assign(groups, kInfinite);
  expanded_.resize(groups);
  for (const auto& at : problem_.groups) {
    for (const Group& group : at) {
      for (int candidate : group.candidates) {
        if (question_.only_gpu && !problem_.candidates[candidate].on_gpu) continue;
        Expanded expanded = problem_.Expand(group, candidate, {0, group.continues, false, false});
        AddSums(expanded);
        launches_ns.clear();
        for (const Task& task : expanded.tasks) launches_ns.push_back(task.launch_ns);
        for (const auto& first : expanded.first) launches_ns[first.first] = 0;
        for (size_t i = 0; i < expanded.tasks.size(); ++i) expanded.tasks[i].launch_ns = launches_ns[i];
        std::fill(free_ns.begin(), free_ns.end(), kNever);
        expanded.least_ns = Execute(expanded.tasks, 0, free_ns.data(), nullptr);
        least_ns_[group.id] = std::min(least_ns_[group.id], expanded.least_ns);
        least[group.id].push_back(std::move(expanded));
      }
    }
  }
  rest_.assign(criteria_, std::vector<double>(positions_ + 1, 0));
  weights_.assign(criteria_, std::vector<double>(groups, kInfinite));
  work_.assign(criteria_, std::vector<double>(groups * mixes_.size(), kInfinite));
  for (int k = 0; k < criteria_; ++k) {
    const double per_ns = question_.criteria[k].per_ns;
    for (int p = positions_ - 1; p >= 0; --p) {
      rest_[k][p] = kInfinite;
      for (const Group& group : problem_.groups[p]) {
        for (const Expanded& e : least[group.id]) rest_[k][p] = std::min(rest_[k][p], e.sums[k] + rest_[k][group.end]);
      }
    }
    for (const auto& at : problem_.groups) {
      for (const Group& group : at) {
        if (rest_[k][group.end] >= kInfinite) continue;  // it leads nowhere
        const double saved = rest_[k][group.end] - rest_[k][group.begin];
        for (const Expanded& e : least[group.id]) {
          double& weight = weights_[k][group.id];
          weight = std::min(weight, per_ns * e.least_ns + e.sums[k] + saved);
          for (size_t m = 0; m < mixes_.size(); ++m) {
            double sum = e.sums[k] + saved;
            for (const Task& task : e.tasks) {
              sum += per_ns * mixes_[m][task.resource] * (task.execution_ns + task.launch_ns);
              for (int r = 0; r < resources_; ++r) {
                if (task.also >> r & 1 && r != task.resource) sum += per_ns * mixes_[m][r] * task.execution_ns;
              }
            }
            double& work = work_[k][group.id * mixes_.size() + m];
            work = std::min(work, sum);
          }
        }
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
  narrow_.assign(positions_, 0);
  for (int e = 0; e < positions_; ++e) {
    bool narrow = !straddled_[e] && !straddled_[e + 1];
    for (int n = 0; n < e && narrow; ++n) narrow = IsTime(Way(live_.ShapeOf(n), e));
    for (int u = e + 1; u < positions_ && narrow; ++u) narrow = IsTime(Way(live_.ShapeOf(e), u));
    narrow_[e] = narrow;
  }
  behind_narrow_.assign(criteria_, std::vector<double>(positions_ + 1, 0));
  for (int e = positions_ - 2; e >= 0; --e) {
    if (!narrow_[e]) continue;
    Bucket behind;  // wherever its result lies
    behind.key = {0};
    behind.slots = 0;
    const StrongBounds strong = Strong(e + 1, behind);
    for (int k = 0; k < criteria_; ++k) {
      behind_narrow_[k][e] = Tail(live_.ShapeOf(e), k);
      for (double load : strong.loads[k]) behind_narrow_[k][e] = std::max(behind_narrow_[k][e], load);
    }
  }
}

/*! \brief By position, what may lie in each set of channels at most from there on, wherever results lie. */
void LabelSearch::PrepareFuturePeaks() {
  std::vector<int> needed_end;  // by region, until when it may be stored: a deferred epilogue may add it late
  for (const Region& region : problem_.regions) needed_end.push_back(region.live_end);
  for (const auto& groups : problem_.groups) {
    for (const Group& group : groups) {
      const auto& readers = problem_.regions[group.end - 1].readers;
      if (!group.defers || readers.empty()) continue;
      for (const Operand& operand : group.operands) {
        int& end = needed_end[operand.region];
        if (operand.access.added >= 0) end = std::max(end, readers.front() + 1);
      }
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
      for (int n = 0; n < group.end; ++n) {  // half of a sum, and a result that is finished for others too
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

/*! \brief Whether a plan with these peaks keeps to the memory whatever follows. */
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

/*! \brief How long it takes at least from a result until groups begin at `position`; `kNever` if they do not wait. */
double LabelSearch::Way(int shape, int position) {
  if (!shape) return kNever;
  Ways& ways = ways_[shape];
  if (ways.begins_ns.empty()) FindWays(shape, ways);
  return position < ways.first ? kNever : ways.begins_ns[position - ways.first];
}

void LabelSearch::FindWays(int shape, Ways& ways) {
  ways.first = live_.Shape(shape).position;
  while (straddled_[ways.first]) --ways.first;  // groups that begin before the reader may do it too
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

/*! \brief How much of a criterion it takes at least, beyond `rest_`, from a result to the end. */
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

LabelSearch::StrongBounds LabelSearch::Strong(int position, const Bucket& bucket) {
  int e = position;
  while (e < positions_ && !narrow_[e]) ++e;
  const int until = std::min(e + 1, positions_);
  std::vector<std::vector<const LiveResult*>> read(until - position);
  for (int i = 0; i < bucket.slots; ++i) {
    for (ResultId id = bucket.key[1 + i]; id && live_[id].position < until; id = live_[id].next) {
      if (!live_[id].by_group.empty()) read[live_[id].position - position].push_back(&live_[id]);
    }
  }
  StrongBounds strong;
  for (int k = 0; k < criteria_; ++k) {
    const double per_ns = question_.criteria[k].per_ns, last = e < positions_ ? behind_narrow_[k][e] : 0;
    // From a result; from the begin of a group, and from there if it waits late.
    std::vector<double> behind(positions_, 0), begins(positions_, kInfinite), waits(positions_, kInfinite);
    std::vector<std::vector<double>> loads(mixes_.size(), std::vector<double>(until - position + 1, kInfinite));
    for (auto& load : loads) load[until - position] = last;
    const auto after = [&](int shape) {
      double most = 0;
      for (; shape && live_.Shape(shape).position < until; shape = live_.Shape(shape).next) {
        const ReadShape& at = live_.Shape(shape);
        if (straddled_[at.position] || at.groups.size() < problem_.groups[at.position].size()) continue;
        bool late = false;
        for (const auto& group : at.groups) late |= group.second;
        most = std::max(most, (late ? waits : begins)[at.position]);
      }
      return most;
    };
    for (int u = until - 1; u >= position; --u) {
      behind[u] = u == e ? last : after(live_.ShapeOf(u));
      for (const Group& group : problem_.groups[u]) {
        if (group.end > until || !group.possible) continue;
        double moved_ns = group.move_ns;
        bool possible = true;
        for (const LiveResult* result : read[u - position]) {
          const Access& access = result->by_group[group.number];
          if (access.reads) possible &= access.possible, moved_ns += access.ns;
        }
        if (!possible) continue;
        const double own = behind[group.end - 1];
        begins[u] = std::min(begins[u], per_ns * moved_ns + weights_[k][group.id] + own);
        waits[u] = std::min(waits[u], own);
        for (size_t m = 0; m < mixes_.size(); ++m) {
          const double moved = group.move_resource >= 0 ? per_ns * moved_ns * mixes_[m][group.move_resource] : 0;
          double& load = loads[m][u - position];
          load = std::min(load, moved + work_[k][group.id * mixes_.size() + m] + loads[m][group.end - position]);
        }
      }
    }
    strong.tails.emplace_back();
    strong.loads.emplace_back();
    for (int i = 0; i < bucket.slots; ++i) {
      strong.tails[k].push_back(std::max(after(bucket.shapes[i]), bucket.tails[i * criteria_ + k]));
    }
    for (const auto& load : loads) strong.loads[k].push_back(load[0]);
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
  for (size_t m = 0; m < mixes_.size(); ++m) {
    double sum = strong.loads[k][m];
    for (int r = 0; r < resources_; ++r) sum += per_ns * mixes_[m][r] * row[r];
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
