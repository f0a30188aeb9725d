#include "canonical_search.h"

#include <algorithm>
#include <array>
#include <limits>
#include <numeric>
#include <tuple>

namespace pimflow {
namespace memory {
namespace {

constexpr int64_t kInfinity = std::numeric_limits<int64_t>::max();
// A level of the recursion takes some 500 bytes of stack, of which a thread may have 8 MiB.
constexpr int64_t kMaxDepth = 8000;
constexpr int64_t kFirstRunNodes = 1000;
constexpr int64_t kFailureBytes = int64_t{64} << 20;
constexpr size_t kFailuresPerSet = 16;
constexpr int64_t kPollNodes = 64;
constexpr double kWeightGrowth = 1.0005, kLargestWeight = 1e100;

/*! \brief What differs between runs; which strategy is fastest depends on the buffers. */
struct Strategy {
  bool lowest_first;             // begin at the lowest bound of all buffers, not of the tightest section
  int64_t capacity_to_softness;  // the smaller, the less slack counts against past failures
  bool shuffled;                 // swap a few places of the order
};
constexpr std::array<Strategy, 6> kStrategies = {{{false, 200, false},
                                                  {false, 20, true},
                                                  {true, 20, false},
                                                  {false, 20, false},
                                                  {false, 200, true},
                                                  {true, 20, true}}};

int64_t RoundUp(int64_t x, int64_t multiple) { return (x + multiple - 1) / multiple * multiple; }

}  // namespace

void Problem::Prepare() {
  int64_t unit = 0;
  for (const Buffer& b : buffers) unit = std::gcd(std::gcd(unit, b.alignment), std::max<int64_t>(b.fixed, 0));
  std::vector<int64_t> live(sections, 0);
  spare.assign(sections, 0);
  for (Buffer& b : buffers) {
    b.stacked = RoundUp(b.size, unit);
    for (int64_t t = b.first; t < b.last; ++t) {
      live[t] += b.stacked;
      spare[t] = std::max(spare[t], b.stacked - b.size);
    }
  }
  for (Buffer& b : buffers) b.total = *std::max_element(live.begin() + b.first, live.begin() + b.last);
}

CanonicalSearch::CanonicalSearch(const Problem& problem, int64_t capacity)
    : problem_(problem),
      buffers_(problem.buffers),
      capacity_(capacity),
      offset_(buffers_.size(), 0),
      postponed_at_(buffers_.size(), -1),
      rank_(buffers_.size(), 0),
      floor_(problem.sections),
      remaining_(problem.sections),
      candidates_(problem.sections),
      lowest_(problem.sections),
      weight_(problem.sections, 0),
      zobrist_(buffers_.size()) {
  for (uint64_t& bits : zobrist_) bits = random_();
}

Outcome CanonicalSearch::Run(int64_t node_limit, Clock::time_point deadline,
                             const std::function<void()>& poll) {
  all_nodes_ = 0;
  all_limit_ = node_limit;
  deadline_ = deadline;
  poll_ = &poll;
  exhausted_ = false;
  Ids ids(buffers_.size());
  std::iota(ids.begin(), ids.end(), 0);
  std::stable_sort(ids.begin(), ids.end(),
                   [&](int a, int b) { return buffers_[a].first < buffers_[b].first; });
  int64_t run_nodes = kFirstRunNodes;
  for (size_t run = 0; !exhausted_; ++run) {
    if (run && run % kStrategies.size() == 0) run_nodes += run_nodes / 2;  // every strategy, then longer
    nodes_ = 0;
    run_limit_ = run_nodes;
    trail_.clear();
    SetStrategy(run);
    bool is_possible = true;
    for (size_t j = 0; j < buffers_.size(); ++j) {
      offset_[j] = std::max<int64_t>(buffers_[j].fixed, 0);
      postponed_at_[j] = -1;
      is_possible = is_possible && offset_[j] + buffers_[j].size <= capacity_;
    }
    if (!is_possible) return Outcome::kInfeasible;
    const Outcome outcome = Descend(ids);
    if (outcome != Outcome::kStopped) return outcome;
  }
  return Outcome::kStopped;
}

/*! \brief Sets the strategy of a run, and which of two buffers with the same bound it takes first. */
void CanonicalSearch::SetStrategy(size_t run) {
  const Strategy& strategy = kStrategies[run % kStrategies.size()];
  lowest_first_ = strategy.lowest_first;
  softness_ = capacity_ / strategy.capacity_to_softness + 1;
  Ids order(buffers_.size());
  std::iota(order.begin(), order.end(), 0);
  auto key = [&](int j) {
    const Problem::Buffer& b = buffers_[j];
    const double area = static_cast<double>(b.width) * static_cast<double>(b.size);
    const int64_t first = lowest_first_ ? b.total : b.width, second = lowest_first_ ? b.width : b.total;
    return std::make_tuple(-first, -second, -area, j);
  };
  std::sort(order.begin(), order.end(), [&](int a, int b) { return key(a) < key(b); });
  if (strategy.shuffled) {
    for (size_t a = 0; a + 1 < order.size(); ++a) {
      if (random_() % 8 == 0) std::swap(order[a], order[std::min(order.size() - 1, a + 1 + random_() % 4)]);
    }
  }
  for (size_t a = 0; a < order.size(); ++a) rank_[order[a]] = static_cast<int>(a);
}

/*! \brief Count a node; true if the budget of nodes, of depth or of time is spent. */
bool CanonicalSearch::SpendNode() {
  ++nodes_;
  if (++all_nodes_ > all_limit_ || depth_ > kMaxDepth) {
    exhausted_ = true;
  } else if (all_nodes_ % kPollNodes == 0) {
    (*poll_)();
    exhausted_ = exhausted_ || Clock::now() >= deadline_;
  }
  return exhausted_ || nodes_ > run_limit_;
}

Outcome CanonicalSearch::Descend(const Ids& ids) {
  if (ids.empty()) return Outcome::kFeasible;
  if (SpendNode()) return Outcome::kStopped;
  const size_t mark = trail_.size();
  if (!PropagateBounds(ids)) {
    Backtrack(mark);
    return Outcome::kInfeasible;
  }
  std::vector<Ids> parts;
  int64_t part_end = -1;
  for (int j : ids) {
    if (buffers_[j].first >= part_end) parts.emplace_back();
    parts.back().push_back(j);
    part_end = std::max(part_end, buffers_[j].last);
  }
  std::stable_sort(parts.begin(), parts.end(), [](const Ids& a, const Ids& b) { return a.size() < b.size(); });
  Outcome outcome = Outcome::kFeasible;
  for (size_t p = 0; p < parts.size() && outcome == Outcome::kFeasible; ++p) {
    // A postponed buffer excludes plans that were searched with all parts together. For this part by itself
    // that holds only if the other parts are known to have a plan.
    if (p + 1 < parts.size()) {
      for (int j : parts[p]) {
        if (postponed_at_[j] >= 0) Save(j), postponed_at_[j] = -1;
      }
    }
    outcome = Branch(parts[p]);
  }
  if (outcome != Outcome::kFeasible) Backtrack(mark);
  return outcome;
}

Outcome CanonicalSearch::Branch(const Ids& ids) {
  const uint64_t key = BufferSetKey(ids);
  if (IsKnownFailure(key, ids)) return Outcome::kInfeasible;
  const size_t mark = trail_.size();
  for (;;) {
    const int buffer = ChooseBuffer(ids);
    const size_t try_mark = trail_.size();
    const Outcome outcome = PlaceAndDescend(ids, buffer);
    if (outcome != Outcome::kFeasible) Backtrack(outcome == Outcome::kStopped ? mark : try_mark);
    if (outcome != Outcome::kInfeasible) return outcome;
    if (!Postpone(ids, buffer) || !PropagateBounds(ids)) break;
  }
  Backtrack(mark);
  StoreFailure(key, ids);
  return Outcome::kInfeasible;
}

Outcome CanonicalSearch::PlaceAndDescend(const Ids& ids, int buffer) {
  if (!Place(ids, buffer)) return Outcome::kInfeasible;
  Ids remaining(ids.size() - 1);
  std::copy_if(ids.begin(), ids.end(), remaining.begin(), [&](int j) { return j != buffer; });
  ++depth_;
  const Outcome outcome = Descend(remaining);
  --depth_;
  return outcome;
}

bool CanonicalSearch::Place(const Ids& ids, int buffer) {
  const int64_t bottom = offset_[buffer], top = Top(buffer);
  for (int j : ids) {
    if (j == buffer || !OverlapInTime(j, buffer)) continue;
    if (postponed_at_[j] >= 0 && bottom < postponed_at_[j] + buffers_[j].stacked) {
      Save(j);
      postponed_at_[j] = -1;  // it has something to rest on
    }
    if (Raise(j, top)) continue;
    const int64_t begin = std::max(buffers_[j].first, buffers_[buffer].first);
    const int64_t end = std::min(buffers_[j].last, buffers_[buffer].last);
    for (int64_t t = begin; t < end; ++t) RaiseWeight(t, 1.0 / static_cast<double>(end - begin));
    return false;
  }
  return true;
}

/*! \brief The lowest top of all buffers that can still reach into the place of `buffer` at `bottom`. */
int64_t CanonicalSearch::LowestSupport(const Ids& ids, int buffer, int64_t bottom) const {
  int64_t lowest = kInfinity;
  const int64_t top = bottom + buffers_[buffer].stacked;
  for (int j : ids) {
    if (offset_[j] < top && OverlapInTime(j, buffer) && j != buffer) lowest = std::min(lowest, Top(j));
  }
  return lowest;
}

bool CanonicalSearch::Postpone(const Ids& ids, int buffer) {
  if (buffers_[buffer].fixed >= 0) return false;
  const int64_t support = LowestSupport(ids, buffer, offset_[buffer]);
  if (support == kInfinity) return false;
  Save(buffer);
  // If it was postponed before and still rests on nothing, the older place is the stronger condition.
  if (postponed_at_[buffer] < 0) postponed_at_[buffer] = offset_[buffer];
  return Raise(buffer, support);
}

/*! \brief Propagate the bounds; false if there is no plan. */
bool CanonicalSearch::PropagateBounds(const Ids& ids) {
  for (bool changed = true; changed;) {
    if (!RaisePostponed(ids) || !StackSections(ids) || !RaiseAboveOnlyLowest(ids, &changed)) return false;
  }
  return true;
}

bool CanonicalSearch::RaisePostponed(const Ids& ids) {
  for (bool changed = true; changed;) {
    changed = false;
    for (int j : ids) {
      if (postponed_at_[j] < 0) continue;
      const int64_t support = LowestSupport(ids, j, postponed_at_[j]);
      if (support == kInfinity) return false;
      if (support <= offset_[j]) continue;
      if (!Raise(j, support)) return false;
      changed = true;
    }
  }
  return true;
}

void CanonicalSearch::FindSpan(const Ids& ids, int64_t* begin, int64_t* end) const {
  *begin = buffers_[ids.front()].first;
  *end = 0;
  for (int j : ids) *end = std::max(*end, buffers_[j].last);
}

bool CanonicalSearch::StackSections(const Ids& ids) {
  int64_t begin, end;
  FindSpan(ids, &begin, &end);
  std::fill(floor_.begin() + begin, floor_.begin() + end, kInfinity);
  std::fill(remaining_.begin() + begin, remaining_.begin() + end, 0);
  for (int j : ids) {
    const int64_t offset = offset_[j], stacked = buffers_[j].stacked;
    for (int64_t t = buffers_[j].first; t < buffers_[j].last; ++t) {
      floor_[t] = std::min(floor_[t], offset);
      remaining_[t] += stacked;
    }
  }
  for (int64_t t = begin; t < end; ++t) {
    if (remaining_[t] && floor_[t] + remaining_[t] - problem_.spare[t] > capacity_) {
      RaiseWeight(t);
      return false;
    }
  }
  return true;
}

/*! \brief If only one buffer of a section can be its lowest, raise all others above it. */
bool CanonicalSearch::RaiseAboveOnlyLowest(const Ids& ids, bool* changed) {
  *changed = false;
  int64_t begin, end;
  FindSpan(ids, &begin, &end);
  std::fill(candidates_.begin() + begin, candidates_.begin() + end, 0);
  for (int j : ids) {
    for (int64_t t = buffers_[j].first; t < buffers_[j].last; ++t) {
      if (offset_[j] + remaining_[t] - problem_.spare[t] > capacity_) continue;
      ++candidates_[t];
      lowest_[t] = j;
    }
  }
  for (int j : ids) {
    for (int64_t t = buffers_[j].first; t < buffers_[j].last; ++t) {
      if (candidates_[t] != 1 || lowest_[t] == j || offset_[j] >= Top(lowest_[t])) continue;
      *changed = true;
      if (!Raise(j, Top(lowest_[t]))) {
        RaiseWeight(t);
        return false;
      }
    }
  }
  return true;
}

bool CanonicalSearch::IsBefore(int j, int best) const {
  if (best < 0) return true;
  return offset_[j] != offset_[best] ? offset_[j] < offset_[best] : rank_[j] < rank_[best];
}

/*! \brief The lowest buffer of the tightest section or of all; then what fits below it, and so on. */
int CanonicalSearch::ChooseBuffer(const Ids& ids) const {
  const int64_t section = lowest_first_ ? -1 : TightestSection(ids);
  int best = -1;
  for (int j : ids) {
    const bool is_in_section = section < 0 || (buffers_[j].first <= section && section < buffers_[j].last);
    if (is_in_section && IsBefore(j, best)) best = j;
  }
  for (;;) {
    int lower = -1;
    for (int j : ids) {
      if (j != best && Top(j) <= offset_[best] && OverlapInTime(j, best) && IsBefore(j, lower)) lower = j;
    }
    if (lower < 0) return best;
    best = lower;
  }
}

int CanonicalSearch::TightestSection(const Ids& ids) const {
  int64_t begin, end;
  FindSpan(ids, &begin, &end);
  int tightest = -1;
  double best_score = -1;
  for (int64_t t = begin; t < end; ++t) {
    if (!remaining_[t]) continue;
    const int64_t slack = capacity_ - (floor_[t] + remaining_[t] - problem_.spare[t]);
    const double score = (weight_[t] / weight_step_ + 1e-3) / static_cast<double>(slack + softness_);
    if (score > best_score) best_score = score, tightest = static_cast<int>(t);
  }
  return tightest;
}

bool CanonicalSearch::Raise(int buffer, int64_t bound) {
  if (offset_[buffer] >= bound) return true;
  if (buffers_[buffer].fixed >= 0) return false;
  Save(buffer);
  offset_[buffer] = RoundUp(bound, buffers_[buffer].alignment);
  return offset_[buffer] + buffers_[buffer].size <= capacity_;
}

void CanonicalSearch::Backtrack(size_t mark) {
  for (; trail_.size() > mark; trail_.pop_back()) {
    const TrailEntry& entry = trail_.back();
    offset_[entry.buffer] = entry.offset;
    postponed_at_[entry.buffer] = entry.postponed_at;
  }
}

void CanonicalSearch::RaiseWeight(int64_t section, double share) {
  weight_[section] += share * weight_step_;
  weight_step_ *= kWeightGrowth;
  if (weight_step_ < kLargestWeight) return;
  for (double& weight : weight_) weight /= weight_step_;
  weight_step_ = 1;
}

uint64_t CanonicalSearch::BufferSetKey(const Ids& ids) const {
  uint64_t key = 0;
  for (int j : ids) key ^= zobrist_[j];
  return key;
}

bool CanonicalSearch::IsKnownFailure(uint64_t key, const Ids& ids) const {
  const auto entry = failures_.find(key);
  if (entry == failures_.end()) return false;
  for (const Failure& failure : entry->second) {
    if (failure.ids != ids) continue;
    size_t a = 0;
    while (a < ids.size() && failure.offsets[a] <= offset_[ids[a]]) ++a;
    if (a == ids.size()) return true;
  }
  return false;
}

void CanonicalSearch::StoreFailure(uint64_t key, const Ids& ids) {
  if (failure_bytes_ > kFailureBytes) return;
  Failure failure{ids, {}};
  failure.offsets.reserve(ids.size());
  for (int j : ids) failure.offsets.push_back(offset_[j]);
  std::vector<Failure>& failures = failures_[key];
  if (failures.size() < kFailuresPerSet) {
    failure_bytes_ += static_cast<int64_t>(sizeof(Failure) + ids.size() * (sizeof(int) + sizeof(int64_t)));
    failures.push_back(std::move(failure));
  } else {
    failures[random_() % kFailuresPerSet] = std::move(failure);
  }
}

}  // namespace memory
}  // namespace pimflow
