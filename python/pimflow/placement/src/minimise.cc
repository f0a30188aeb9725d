/*!
 * \file minimise.cc
 * \brief Beams, and branch and bound on the peaks of the pools where their sum is bounded.
 */
#include <algorithm>
#include <array>
#include <cmath>
#include <initializer_list>
#include <memory>
#include <numeric>
#include <optional>
#include <queue>
#include <utility>
#include <vector>

#include "label_search.h"

namespace pimflow {
namespace placement {
namespace {

constexpr int64_t kBeam = 100;       // its plan is an upper bound for the exact search
constexpr int64_t kEasy = 4000;      // labels at a position, up to which bounds of segments take longer than they save
constexpr int64_t kWideBeam = 1000;  // for a better plan where the exact search is given up
constexpr double kSmallGap = 5e-3;   // of a value, which one run closes
constexpr double kUnknownGap = 0.1;  // of the bound, where no plan is known

double BestValue(const LabelSearch& search, const Result& result) {
  return result.solutions.empty() ? kInfinite : search.Value(result.solutions[0]);
}

/*!
 * \brief A run of a search with a beam, or exactly, for plans up to a share of the way from the bound to the best value.
 *
 * The labels of an exact search grow fast with the values that it allows, and the best is often near the bound.
 */
struct Run { int64_t beam; double share; };

/*! \brief The best plan of a value of at most `upper_bound`, if not `best`, from which on it is searched. */
Result FindBestPlan(LabelSearch& search, double upper_bound, std::initializer_list<Run> runs, Result best) {
  bool is_hopeless = false;  // labels were dropped although all were searched
  for (const Run& run : runs) {
    const double value = BestValue(search, best);
    if (value < kInfinite && search.IsTimeUp()) break;
    if (!run.beam && (is_hopeless || (run.share < 1 && search.IsTimeUp()))) continue;
    const double last = value < kInfinite ? value * (1 + kRounding) : upper_bound;
    const bool allows_all = run.share >= 1 || last - best.bound < kSmallGap * last;
    double limit = last;
    if (!allows_all) limit = best.bound + run.share * (std::min(last, best.bound * (1 + kUnknownGap)) - best.bound);
    search.SetUpperBound(limit);
    Result next = search.Run(run.beam);
    is_hopeless |= !run.beam && next.dropped_bound < kInfinite;
    best.bound = std::max(best.bound, allows_all ? next.bound : std::min(next.bound, limit));
    best.labels += next.labels;
    best.max_labels_at_position = std::max(best.max_labels_at_position, next.max_labels_at_position);
    best.dropped_bound = next.dropped_bound;
    if (!next.solutions.empty()) best.solutions = std::move(next.solutions);
    if (best.bound >= BestValue(search, best)) break;
  }
  best.bound = std::min(best.bound, BestValue(search, best));
  return best;
}

/*! \brief The plans whose pools take at most `max_bytes`; plans whose pools take less than `min_bytes` are in other
 * boxes. */
struct PoolBox {
  double bound;  // lower bound of their values
  PoolBytes min_bytes, max_bytes;
  Result best;   // of a box that contains this one

  bool operator<(const PoolBox& box) const { return bound > box.bound; }  // the smallest bound comes first
  bool HasBestPlan() const {
    if (best.solutions.empty()) return false;
    for (int set = 0; set < kChannelSets; ++set) {
      if (best.solutions[0].peaks[set] > max_bytes[set]) return false;
    }
    return true;
  }
  /*! \brief Bound each pool by what the minima of the others leave of the budget; false if the box is empty. */
  bool Shrink(double budget) {
    const double min_sum_bytes = std::accumulate(min_bytes.begin(), min_bytes.end(), 0.0);
    for (int set = 0; set < kChannelSets; ++set) {
      max_bytes[set] = std::min(max_bytes[set], budget - (min_sum_bytes - min_bytes[set]));
      if (max_bytes[set] < min_bytes[set]) return false;
    }
    return true;
  }
};

/*! \brief Split a box in two along one pool, so that neither allows the pools of its best plan. */
std::array<PoolBox, 2> Split(const PoolBox& box, double budget) {
  const Solution& plan = box.best.solutions[0];
  int widest = 0;
  for (int set = 1; set < kChannelSets; ++set) {
    if (plan.peaks[set] - box.min_bytes[set] > plan.peaks[widest] - box.min_bytes[widest]) widest = set;
  }
  const double less = std::max((plan.pool_bytes - budget) / 2, 1.0);
  const double split_bytes = std::floor(std::max(box.min_bytes[widest], plan.peaks[widest] - less));
  std::array<PoolBox, 2> halves{box, box};
  halves[0].max_bytes[widest] = split_bytes;
  halves[1].min_bytes[widest] = split_bytes + 1;
  return halves;
}

/*!
 * \brief The best plan whose pools together keep to a budget.
 *
 * If each pool has a bound of its own, labels need not compare peaks: a search is as fast as one without memory. Boxes
 * are split until the best plan of each keeps to the budget, or is no better than a known plan.
 */
Result BranchOnPools(LabelSearch& search, const Query& query, int64_t beam, Result best) {
  const double budget = query.max_memory_bytes;
  if (const std::optional<Result> whole = search.RunExact(query.compared_labels)) return *whole;
  double upper_bound = std::min(query.criteria[0].upper_bound, BestValue(search, best) * (1 - kRounding));
  std::priority_queue<PoolBox> boxes;
  boxes.push({best.bound, {}, {budget, budget, budget}, {}});
  best.bound = kInfinite;  // of the boxes so far
  while (!boxes.empty()) {
    PoolBox box = boxes.top();
    boxes.pop();
    if (box.bound > upper_bound) break;  // so are all other boxes
    if (search.IsTimeUp()) {
      best.bound = std::min(best.bound, box.bound);
      break;
    }
    if (!box.HasBestPlan()) {
      search.BoundPools(box.max_bytes);
      box.best = FindBestPlan(search, upper_bound, {{beam, 1}, {0, 1.0 / 16}, {0, 1.0 / 4}, {0, 1}}, {{}, box.bound});
      box.bound = std::max(box.bound, box.best.bound);
      best.labels += box.best.labels;
      best.max_labels_at_position = std::max(best.max_labels_at_position, box.best.max_labels_at_position);
    }
    if (!box.best.solutions.empty() && box.best.solutions[0].pool_bytes > budget) {
      for (const PoolBox& half : Split(box, budget)) {
        if (PoolBox part = half; part.Shrink(budget)) boxes.push(std::move(part));
      }
      continue;
    }
    best.bound = std::min(best.bound, box.bound);
    if (box.best.solutions.empty()) continue;
    best.solutions = std::move(box.best.solutions);
    upper_bound = BestValue(search, best) * (1 - kRounding);
  }
  best.dropped_bound = best.bound;
  best.bound = std::min(best.bound, BestValue(search, best));
  return best;
}

}  // namespace

Result Minimise(const MakeSearch& make_search, const Query& query) {
  const bool shares_budget = query.counts_memory && query.capacity_bytes >= kInfinite && !query.minimises_memory;
  const double upper_bound = query.minimises_memory ? query.max_memory_bytes : query.criteria[0].upper_bound;
  const int64_t beam = shares_budget ? std::min(kBeam, query.compared_labels) : kBeam;
  std::unique_ptr<LabelSearch> search = make_search(false);
  Result best = FindBestPlan(*search, upper_bound, {{beam, 1}}, {{}, -kInfinite});
  // With as few labels a further run finds no more.
  if (query.max_labels <= kBeam || best.bound >= BestValue(*search, best)) return best;
  if (!shares_budget) {
    if (std::optional<Result> whole = search->RunExact(kEasy)) {
      if (whole->solutions.empty()) whole->solutions = std::move(best.solutions);
      whole->labels += best.labels;
      whole->bound = std::min(whole->bound, BestValue(*search, *whole));
      return *whole;
    }
  }
  search = make_search(true);
  if (shares_budget) {
    search->SetUpperBound(std::min(upper_bound, BestValue(*search, best) * (1 + kRounding)));
    return BranchOnPools(*search, query, beam, std::move(best));
  }
  return FindBestPlan(*search, upper_bound, {{0, 1}, {kWideBeam, 1}}, std::move(best));
}

}  // namespace placement
}  // namespace pimflow
