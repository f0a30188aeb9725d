/*!
 * \file lookahead.cc
 * \brief Stronger lower bounds of the labels of a bucket: chains of results and loads over the next positions.
 */
#include <algorithm>
#include <utility>
#include <vector>

#include "label_search.h"

namespace pimflow {
namespace placement {
namespace {

constexpr int kHorizon = 32;  // positions

}  // namespace

/*! \brief Bounds of the states of a key over the positions up to the horizon, or to the end of the segment. */
class LabelSearch::Lookahead {
 public:
  Lookahead(LabelSearch& search, int position, const Key& key)
      : search_(search),
        segment_(search.segments_[search.position_segments_[position]]),
        position_(position),
        end_(std::min(segment_.end, position + kHorizon)),
        key_(key),
        reads_(end_ - position) {
    for (size_t i = 1; i < key.size(); ++i) {
      bool is_first = true;
      for (ResultId id = key[i]; id && search.live_[id].position < end_; id = search.live_[id].next) {
        const LiveResult& result = search.live_[id];
        if (result.by_group.empty()) continue;
        reads_[result.position - position].emplace_back(&result, is_first && result.deferral);
        is_first = false;
      }
    }
  }

  BucketBounds Bounds() {
    BucketBounds bounds;
    for (k_ = 0; k_ < search_.criteria_; ++k_) {
      mixes_ = segment_.mixes[k_].size();
      result_tails_.assign(end_ - position_, 0);
      begin_tails_.assign(end_ - position_, kInfinite);
      late_tails_.assign(end_ - position_, kInfinite);
      loads_.assign((end_ - position_) * kFlagSets * mixes_, kInfinite);
      for (int u = end_ - 1; u >= position_; --u) {
        if (u + 1 < segment_.end) result_tails_[u - position_] = ReaderTail(search_.live_.ResultShape(u));
        for (const Group& group : search_.problem_.groups[u]) AddGroup(group);
      }
      bounds.tails.emplace_back();
      for (size_t i = 1; i < key_.size(); ++i) {
        const int shape = search_.live_[key_[i]].shape;
        bounds.tails[k_].push_back(std::max(ReaderTail(shape), search_.TailBound(shape, k_)));
      }
      const double* loads = Loads(position_, key_[0] & (kFlagSets - 1));
      bounds.loads.emplace_back(loads, loads + mixes_);
      first_load_bound_ += mixes_;
    }
    return bounds;
  }

 private:
  /*! \brief What a group does with the results that it reads. */
  struct Reading {
    double transform_ns, transform_pj;
    uint32_t deferred;  // epilogues that it does for sure
  };

  double* Loads(int position, uint32_t flags) {
    return &loads_[((position - position_) * kFlagSets + flags) * mixes_];
  }

  /*! \brief A lower bound from a result on, by those of its readers that every plan contains. */
  double ReaderTail(int shape) const {
    double max_tail = 0;
    for (; shape && search_.live_.Shape(shape).position < end_; shape = search_.live_.Shape(shape).next) {
      const ReadShape& read = search_.live_.Shape(shape);
      const size_t groups = search_.problem_.groups[read.position].size();
      if (search_.is_straddled_[read.position] || read.groups.size() < groups) continue;
      bool is_late = false;
      for (const auto& group : read.groups) is_late |= group.second;
      max_tail = std::max(max_tail, (is_late ? late_tails_ : begin_tails_)[read.position - position_]);
    }
    return max_tail;
  }

  void AddGroup(const Group& group) {
    if (!group.is_possible || !search_.CanComplete(group, k_)) return;
    Reading reading{group.transform_ns, group.transform_pj, 0};
    for (const auto& [result, is_deferred] : reads_[group.begin - position_]) {
      const Access& access = result->by_group[group.number];
      if (!access.reads) continue;
      if (!access.is_possible) return;
      reading.transform_ns += access.ns, reading.transform_pj += access.pj;
      if (is_deferred && access.deferred >= 0) reading.deferred |= 1u << access.deferred;
    }
    if (group.begin == position_) return AddFlags(group, reading, key_[0] & (kFlagSets - 1));
    for (uint32_t flags = 0; flags < kFlagSets; ++flags) AddFlags(group, reading, flags);
  }

  /*! \brief Add a group in a state with `flags`. */
  void AddFlags(const Group& group, const Reading& reading, uint32_t flags) {
    const Expansion& expansion =
        search_.FindExpansion(group, search_.MakePredecessorState(group, flags, reading.deferred));
    if (expansion.candidates.empty()) return;
    const Criterion& criterion = search_.query_.criteria[k_];
    const double sum = search_.SumBoundChange(group, k_) + criterion.per_pj * reading.transform_pj;
    const double transform = criterion.per_ns * reading.transform_ns;
    const bool ends_segment = group.end == segment_.end;
    const double end_bound = ends_segment ? search_.group_end_bounds_[k_][group.id * kFlagSets + flags] : 0;
    const double tail = ends_segment       ? end_bound
                        : group.end > end_ ? search_.tail_bounds_[k_][search_.live_.ResultShape(group.end - 1)]
                                           : result_tails_[group.end - 1 - position_];
    double &begin_tail = begin_tails_[group.begin - position_], &late_tail = late_tails_[group.begin - position_];
    begin_tail = std::min(begin_tail, transform + expansion.lower_bounds[k_] + sum + tail);
    late_tail = std::min(late_tail, tail);
    const double* next = group.end < end_ ? Loads(group.end, search_.NextFlags(group, flags) % kFlagSets)
                         : ends_segment   ? nullptr
                                          : search_.load_bounds_[k_][group.end].data();
    double* loads = Loads(group.begin, flags);
    for (size_t i = 0; i < mixes_; ++i) {
      double load = sum + expansion.load_bounds[first_load_bound_ + i] + (next ? next[i] : end_bound);
      if (group.transform_resource >= 0) {
        load += transform * search_.mixes_[segment_.mixes[k_][i]][group.transform_resource];
      }
      loads[i] = std::min(loads[i], load);
    }
  }

  LabelSearch& search_;
  const Segment& segment_;
  const int position_, end_;
  const Key& key_;
  // By position, the results read there, and whether an epilogue is deferred for sure: the first reader may do it, and
  // then nothing remains for others.
  std::vector<std::vector<std::pair<const LiveResult*, bool>>> reads_;
  int k_ = 0;  // the criterion
  size_t mixes_ = 0, first_load_bound_ = 0;  // of the criterion, in `Expansion::load_bounds`
  // By position, lower bounds from its result; from the begin of its groups; and from their late operands.
  std::vector<double> result_tails_, begin_tails_, late_tails_;
  std::vector<double> loads_;  // by position, flags and mix
};

LabelSearch::BucketBounds LabelSearch::LookaheadBounds(int position, const Key& key) {
  return Lookahead(*this, position, key).Bounds();
}

}  // namespace placement
}  // namespace pimflow
