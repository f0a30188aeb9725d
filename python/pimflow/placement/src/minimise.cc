/*!
 * \file minimise.cc
 * \brief Beams, and branch and bound on the peaks of the pools where their sum is bounded.
 */
#include "minimise.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <numeric>
#include <optional>
#include <queue>
#include <utility>
#include <vector>

namespace pimflow {
namespace placement {
namespace {

using Beams = std::vector<int64_t>;
const Beams kBeams = {100, 10000, 0};  // the plan of a quick search is an upper bound for the next one
const Beams kQuickBeams = {100, 10000};
const Beams kBeamsBesidePlan = {10000, 0};
constexpr double kRounding = 1e-9;  // values of the same plan are summed in different orders

double ValueOf(const LabelSearch& search, const Result& result) {
  return result.solutions.empty() ? kInfinite : search.Value(result.solutions[0]);
}

/*! \brief The best plan of a value of at most `at_most`. */
Result BestBelow(LabelSearch& search, double at_most, const Beams& beams) {
  Result best;
  double bound = -kInfinite;
  search.SetMost(at_most);
  for (int64_t beam : beams) {
    Result next = search.Run(beam, !best.solutions.empty());
    if (next.solutions.empty()) next.solutions = std::move(best.solutions);
    best = std::move(next);
    const double value = ValueOf(search, best);
    bound = std::max(bound, std::min(best.bound, value));
    if (bound >= value || (value < kInfinite && search.IsLate())) break;
    if (value < kInfinite) search.SetMost(value * (1 + kRounding));
  }
  best.bound = bound;
  return best;
}

/*! \brief The plans whose pools take at most `most`; plans whose pools take less than `least` are in other boxes. */
struct Box {
  double bound;  // lower bound of their values
  PoolBytes least, most;
  Result best;   // of a box that contains this one

  bool operator<(const Box& other) const { return bound > other.bound; }  // the smallest bound comes first
  bool HoldsItsBest() const {
    if (best.solutions.empty()) return false;
    for (int set = 0; set < kChannelSets; ++set) {
      if (best.solutions[0].peaks[set] > most[set]) return false;
    }
    return true;
  }
  /*! \brief Bound each pool by what the minima of the others leave of the budget; false if the box is empty. */
  bool Shrink(double budget) {
    const double least_sum = std::accumulate(least.begin(), least.end(), 0.0);
    for (int set = 0; set < kChannelSets; ++set) {
      most[set] = std::min(most[set], budget - (least_sum - least[set]));
      if (most[set] < least[set]) return false;
    }
    return true;
  }
};

/*! \brief Split a box in two along one pool, so that neither allows the pools of its best plan. */
std::array<Box, 2> Split(const Box& box, double budget) {
  const Solution& plan = box.best.solutions[0];
  int widest = 0;
  for (int set = 1; set < kChannelSets; ++set) {
    if (plan.peaks[set] - box.least[set] > plan.peaks[widest] - box.least[widest]) widest = set;
  }
  const double less = std::max((plan.pool_bytes - budget) / 2, 1.0);
  const double at = std::floor(std::max(box.least[widest], plan.peaks[widest] - less));
  std::array<Box, 2> halves{box, box};
  halves[0].most[widest] = at;
  halves[1].least[widest] = at + 1;
  return halves;
}

/*!
 * \brief The best plan whose pools together keep to a budget.
 *
 * If each pool has a bound of its own, labels need not compare peaks: a search is as fast as one without memory. Boxes
 * are split until the best plan of each keeps to the budget, or is no better than a known plan.
 */
Result BestWithinBudget(LabelSearch& search, const Question& question) {
  const double budget = question.max_memory_bytes;
  const int64_t compared = question.compared_labels;
  Beams quick;
  for (int64_t beam : kQuickBeams) quick.push_back(std::min(beam, compared));
  Result best = BestBelow(search, question.criteria[0].at_most, quick);
  const double known = ValueOf(search, best);
  if (known < kInfinite && best.bound >= known) return best;
  if (const std::optional<Result> whole = search.RunWhole(compared)) return *whole;
  double at_most = std::min(question.criteria[0].at_most, ValueOf(search, best) * (1 - kRounding));
  best.bound = kInfinite;  // of the boxes so far
  std::priority_queue<Box> boxes;
  boxes.push({-kInfinite, {}, {budget, budget, budget}, {}});
  while (!boxes.empty()) {
    Box box = boxes.top();
    boxes.pop();
    if (box.bound > at_most) break;  // so are all other boxes
    if (search.IsLate()) {
      best.bound = std::min(best.bound, box.bound);
      break;
    }
    if (!box.HoldsItsBest()) {
      search.BoundPools(box.most);
      box.best = BestBelow(search, at_most, kBeamsBesidePlan);
      box.bound = std::max(box.bound, box.best.bound);
      best.labels += box.best.labels;
      best.most_labels = std::max(best.most_labels, box.best.most_labels);
    }
    if (!box.best.solutions.empty() && box.best.solutions[0].pool_bytes > budget) {
      for (const Box& half : Split(box, budget)) {
        if (Box part = half; part.Shrink(budget)) boxes.push(std::move(part));
      }
      continue;
    }
    best.bound = std::min(best.bound, box.bound);
    if (box.best.solutions.empty()) continue;
    best.solutions = std::move(box.best.solutions);
    at_most = ValueOf(search, best) * (1 - kRounding);
  }
  best.dropped = best.bound;
  best.bound = std::min(best.bound, ValueOf(search, best));
  return best;
}

}  // namespace

Result Minimise(LabelSearch& search, const Question& question) {
  if (question.minimises_memory) return BestBelow(search, question.max_memory_bytes, kBeams);
  const bool shares_budget = question.counts_memory && question.capacity_bytes >= kInfinite;
  return shares_budget ? BestWithinBudget(search, question) : BestBelow(search, question.criteria[0].at_most, kBeams);
}

}  // namespace placement
}  // namespace pimflow
