/*!
 * \file segment_search.cc
 * \brief Lower bounds behind narrow positions, by a search of each segment from every state in which it may begin.
 *
 * After a narrow position all work waits for one result. What follows depends on that result and on flags; a search
 * that begins with them at time 0, with all launches hidden that may be, bounds it from below. Segments are searched
 * from the last to the first, so that the bound of a segment has those of the later ones in it.
 */
#include <algorithm>
#include <array>
#include <cmath>
#include <initializer_list>
#include <memory>
#include <mutex>
#include <optional>

#include "label_search.h"

namespace pimflow {
namespace placement {
namespace {

constexpr int64_t kFirstBeam = 50, kSegmentBeam = 1000;  // labels at a position
constexpr double kUnprovableGap = 0.1;  // of the first beam, from which on a wider one would prove nothing

}  // namespace

/*!
 * \brief Whether the groups of a segment may apply epilogues of results before it, besides that of the last one.
 *
 * A search of the segment alone does not know such results. Whether a launch follows may depend on them.
 */
bool LabelSearch::MayApplyEarlierEpilogues(const Segment& segment) const {
  for (int u = segment.begin; u < segment.end; ++u) {
    for (const Group& group : problem_.groups[u]) {
      for (const Operand& operand : group.reading->operands) {
        if (operand.deferred >= 0 && operand.region + 1 < segment.begin) return true;
      }
    }
  }
  return false;
}

/*! \brief A lower bound of the only criterion from the begin of a segment on, beyond the sums, in a state. */
double LabelSearch::SearchSegment(int s, const Key& key) {
  const int begin = segments_[s].begin, end = segments_[s].end;
  if (segments_[s].is_unprovable) return -kInfinite;
  if (problem_.launches_ahead && MayApplyEarlierEpilogues(segments_[s])) return -kInfinite;
  const double given_bound = query_.criteria[0].upper_bound;
  const double longest_ns = *std::max_element(problem_.longest_launch_ns.begin(), problem_.longest_launch_ns.end());
  double bound = -kInfinite;
  query_.criteria[0].upper_bound = kInfinite;
  for (int64_t beam : {kFirstBeam, kSegmentBeam}) {
    if (IsTimeUp()) break;
    ClearLabels();
    AddFirstLabel(begin, key, longest_ns);
    Key awaited = key;
    awaited[0] |= kAwaitedResult;
    if (problem_.launches_ahead) AddFirstLabel(begin, awaited, longest_ns);
    ExpandPositions(begin, end, beam);
    double value = kInfinite;
    for (const Bucket& bucket : buckets_[end]) {
      for (size_t l = 0; l < bucket.origins.size(); ++l) {
        value = std::min(value, LowerBound(end, bucket, &bucket.rows[l * bucket.width], 0));
      }
    }
    bound = std::max(bound, std::min(value, dropped_bound_));
    if (bound >= value) break;
    segments_[s].is_unprovable = bound < (1 - kUnprovableGap) * value;
    if (segments_[s].is_unprovable) break;
    query_.criteria[0].upper_bound = value * (1 + kRounding);
  }
  query_.criteria[0].upper_bound = given_bound;
  ClearLabels();
  return std::abs(bound) < kInfinite ? bound - sum_bounds_[0][begin] : bound;
}

/*! \brief Choose mixes of resources for a segment, and bound what follows from each position in it. */
void LabelSearch::PrepareSegment(int s) {
  Segment& segment = segments_[s];
  segment.mixes.resize(criteria_);
  for (int k = 0; k < criteria_; ++k) ChooseMixes(segment, k);
  for (int u = segment.begin; u < segment.end; ++u) {
    for (const Group& group : problem_.groups[u]) {
      for (Expansion& expansion : expansions_[group.id]) SetLoadBounds(group, expansion);
    }
  }
  if (segment.end < positions_) {
    for (const Group& group : problem_.groups[segment.end - 1]) {
      for (uint32_t flags = 0; flags < kFlagSets; ++flags) {
        const auto& bounds = segment_bounds_[s + 1].at(SegmentKey(NextKey(group, flags)));
        for (int k = 0; k < criteria_; ++k) group_end_bounds_[k][group.id * kFlagSets + flags] = bounds[k];
      }
    }
  }
  for (int k = 0; k < criteria_; ++k) {
    for (int u = segment.end - 1; u >= segment.begin; --u) SetPositionLoads(segment, u, k);
  }
  if (!segment.begin) return;
  for (const Group& group : problem_.groups[segment.begin - 1]) {
    for (uint32_t flags = 0; flags < kFlagSets; ++flags) {
      const Key key = NextKey(group, flags);
      if (segment_bounds_[s].count(SegmentKey(key))) continue;
      std::optional<BucketBounds> bounds;  // without a search
      std::vector<double> values;
      for (int k = 0; k < criteria_; ++k) {
        double bound = segment_tails_.empty() ? SearchSegment(s, key) : -kInfinite;
        if (bound <= -kInfinite) {
          if (!bounds) bounds = LookaheadBounds(segment.begin, key);
          bound = key.size() > 1 ? bounds->tails[k][0] : 0;
          for (double load : bounds->loads[k]) bound = std::max(bound, load);
          const Tails* tails = segment_tails_.empty() ? nullptr : segment_tails_[k].get();
          const size_t state = group.id * kFlagSets + flags;
          if (tails) bound = std::max(bound, (*tails)[state] - sum_bounds_[k][segment.begin]);
        }
        values.push_back(bound);
      }
      segment_bounds_[s].emplace(SegmentKey(key), std::move(values));
    }
  }
}

Tails LabelSearch::GroupEndBounds() const {
  Tails bounds = group_end_bounds_[0];
  for (const auto& groups : problem_.groups) {
    for (const Group& group : groups) {
      for (uint32_t flags = 0; flags < kFlagSets; ++flags) {
        bounds[group.id * kFlagSets + flags] += sum_bounds_[0][group.end];
      }
    }
  }
  return bounds;
}

namespace {

bool IsOfTimeAndEnergy(const Criterion& c) { return !c.per_error && !c.per_row_byte && !c.per_filter_byte; }

}  // namespace

/*! \brief Tails by those of two criteria whose weighted sum it is, with weights of at least 0; null if none are known. */
std::shared_ptr<const Tails> TailCache::Interpolate(const Criterion& criterion, bool only_gpu) const {
  const Entry *below = nullptr, *above = nullptr;  // with the nearest ratios of time to energy
  const auto is_slower = [](const Criterion& a, const Criterion& b) { return a.per_ns * b.per_pj < b.per_ns * a.per_pj; };
  for (const Entry& entry : entries_) {
    const Criterion& c = entry.criterion;
    if (entry.only_gpu != only_gpu || !IsOfTimeAndEnergy(c)) continue;
    if (!is_slower(criterion, c) && (!below || is_slower(below->criterion, c))) below = &entry;
    if (!is_slower(c, criterion) && (!above || is_slower(c, above->criterion))) above = &entry;
  }
  if (!below || !above || !IsOfTimeAndEnergy(criterion)) return nullptr;
  const Criterion &low = below->criterion, &high = above->criterion;
  const double determinant = high.per_ns * low.per_pj - low.per_ns * high.per_pj;
  double low_weight = low.per_ns ? criterion.per_ns / low.per_ns : 0, high_weight = 0;  // of the same ratio
  if (determinant > 0) {
    low_weight = std::max((high.per_ns * criterion.per_pj - criterion.per_ns * high.per_pj) / determinant, 0.0);
    high_weight = std::max((criterion.per_ns * low.per_pj - low.per_ns * criterion.per_pj) / determinant, 0.0);
  }
  auto tails = std::make_shared<Tails>(*below->tails);
  for (size_t i = 0; i < tails->size(); ++i) {
    (*tails)[i] = low_weight * (*below->tails)[i] + high_weight * (*above->tails)[i];
  }
  return tails;
}

SegmentTails TailCache::Find(const Problem& problem, const Query& query, const Deadline& deadline,
                             const std::function<void()>& poll, bool searches) {
  const std::lock_guard<std::mutex> lock(mutex_);
  SegmentTails tails;
  for (const Criterion& criterion : query.criteria) {
    tails.push_back(criterion.per_ns ? Interpolate(criterion, query.only_gpu) : nullptr);
    if (tails.back() || !criterion.per_ns || !searches || deadline.IsPast()) continue;
    Query alone{{0, 0, query.only_gpu, 0, query.max_labels, query.compared_labels},
                {kInfinite, kInfinite, query.seconds},
                {criterion}};
    alone.criteria[0].upper_bound = kInfinite, alone.criteria[0].tolerance = 0;
    tails.back() = std::make_shared<Tails>(LabelSearch(problem, alone, deadline, poll, {}).GroupEndBounds());
    if (!deadline.IsPast()) entries_.push_back({criterion, query.only_gpu != 0, tails.back()});
  }
  return tails;
}

}  // namespace placement
}  // namespace pimflow
