/*!
 * \file lookahead.cc
 * \brief Stronger lower bounds of the labels of a bucket: chains of results and loads over the next positions.
 */
#include <algorithm>
#include <map>
#include <tuple>
#include <utility>
#include <vector>

#include "label_search.h"

namespace pimflow {
namespace placement {
namespace {

constexpr int kHorizonStep = 16;  // positions; a horizon is two to three steps ahead

}  // namespace

/*! \brief The position up to which the bounds at `position` look ahead. */
int LabelSearch::Horizon(int position) const {
  const Segment& segment = segments_[position_segments_[position]];
  return std::min(segment.end, segment.begin + ((position - segment.begin) / kHorizonStep + 3) * kHorizonStep);
}

/*!
 * \brief Bounds of the states at positions with the same horizon.
 *
 * Behind the last reader of the live results of a state, nothing depends on them: what is bounded from there on is the
 * same for all states (`shared_`).
 */
class LabelSearch::Lookahead {
 public:
  Lookahead(LabelSearch& search, int begin, int end)
      : search_(search),
        segment_(search.segments_[search.position_segments_[begin]]),
        begin_(begin),
        end_(end),
        reads_(end - begin) {
    for (k_ = 0; k_ < search.criteria_; ++k_) {
      shared_.emplace_back(end - begin, segment_.mixes[k_].size());
      for (int u = end - 1; u >= begin; --u) AddPosition(u);
      first_load_bound_ += segment_.mixes[k_].size();
    }
  }

  BucketBounds Bounds(int position, const Key& key) {
    FindReads(position, key);
    BucketBounds bounds;
    first_load_bound_ = 0;
    for (k_ = 0; k_ < search_.criteria_; ++k_) {
      own_ = Table(last_read_ + 1 - begin_, segment_.mixes[k_].size());
      for (int u = last_read_; u > position; --u) AddPosition(u);
      const uint32_t flags = key[0] & (kFlagSets - 1);
      for (GroupClass& group_class : search_.FindClasses(position)) AddClass(group_class, flags, flags);
      bounds.tails.emplace_back();
      for (size_t i = 1; i < key.size(); ++i) {
        const int shape = search_.live_[key[i]].shape;
        bounds.tails[k_].push_back(std::max(ReaderTail(shape), search_.TailBound(shape, k_)));
      }
      const double* loads = Loads(position, flags);
      bounds.loads.emplace_back(loads, loads + own_.mixes);
      first_load_bound_ += own_.mixes;
    }
    for (int u = position; u <= last_read_; ++u) reads_[u - begin_].clear();
    last_read_ = -1;
    return bounds;
  }

 private:
  /*! \brief By position: lower bounds from its result, from the begin of its groups, and from their late operands; by
   * flags and mix besides, those of the loads. */
  struct Table {
    Table() = default;
    Table(size_t positions, size_t mix_count)
        : mixes(mix_count),
          result_tails(positions, 0),
          begin_tails(positions, kInfinite),
          late_tails(positions, kInfinite),
          loads(positions * kFlagSets * mix_count, kInfinite) {}
    size_t mixes = 0;
    std::vector<double> result_tails, begin_tails, late_tails, loads;
  };
  Table& TableAt(int position) { return position <= last_read_ ? own_ : shared_[k_]; }

  double* Loads(int position, uint32_t flags) {
    Table& table = TableAt(position);
    return &table.loads[((position - begin_) * kFlagSets + flags) * table.mixes];
  }

  /*! \brief Note where the live results of a state are read. */
  void FindReads(int position, const Key& key) {
    last_read_ = position;
    for (size_t i = 1; i < key.size(); ++i) {
      bool is_first = true;
      for (ResultId id = key[i]; id && search_.live_[id].position < end_; id = search_.live_[id].next) {
        const LiveResult& result = search_.live_[id];
        if (result.by_group.empty()) continue;
        reads_[result.position - begin_].emplace_back(&result, is_first && result.deferral);
        last_read_ = std::max(last_read_, result.position);
        is_first = false;
      }
    }
  }

  void AddPosition(int u) {
    if (u + 1 < segment_.end) TableAt(u).result_tails[u - begin_] = ReaderTail(search_.live_.ResultShape(u));
    for (GroupClass& group_class : search_.FindClasses(u)) AddClass(group_class, 0, kFlagSets - 1);
    const std::vector<double>& loads = search_.load_bounds_[k_][u];
    for (uint32_t flags = 0; flags < kFlagSets; ++flags) {
      double* flag_loads = Loads(u, flags);
      for (size_t i = 0; i < loads.size(); ++i) flag_loads[i] = std::max(flag_loads[i], loads[i]);
    }
  }

  /*! \brief A lower bound from a result on, by those of its readers that every plan contains. */
  double ReaderTail(int shape) {
    double max_tail = 0;
    for (; shape && search_.live_.Shape(shape).position < end_; shape = search_.live_.Shape(shape).next) {
      const ReadShape& read = search_.live_.Shape(shape);
      const size_t groups = search_.problem_.groups[read.position].size();
      if (search_.is_straddled_[read.position] || read.groups.size() < groups) continue;
      const Table& table = TableAt(read.position);
      max_tail = std::max(max_tail, (read.is_late ? table.late_tails : table.begin_tails)[read.position - begin_]);
    }
    return max_tail;
  }

  /*! \brief Add groups in the states with flags from `first_flags` to `last_flags`. */
  void AddClass(GroupClass& group_class, uint32_t first_flags, uint32_t last_flags) {
    const Group& group = *group_class.groups[0];
    if (!search_.CanComplete(group, k_)) return;
    double transform_ns = group.reading->input_cost.ns, transform_pj = group.reading->input_cost.pj;
    uint32_t deferred = 0;  // epilogues that it does for sure
    for (const auto& [result, is_deferred] : reads_[group.begin - begin_]) {
      const Access& access = result->by_group[group.number];
      if (!access.reads) continue;
      if (!access.is_possible) return;
      transform_ns += access.ns, transform_pj += access.pj;
      if (is_deferred && access.deferred >= 0) deferred |= 1u << access.deferred;
    }
    const Criterion& criterion = search_.query_.criteria[k_];
    const double sum = search_.SumBoundChange(group, k_) + criterion.per_pj * transform_pj;
    const double transform = criterion.per_ns * transform_ns;
    for (uint32_t flags = first_flags; flags <= last_flags; ++flags) {
      const GroupClass::Bounds& bounds = search_.FindClassBounds(group_class, flags, deferred);
      if (bounds.lower_bounds[k_] < kInfinite) AddBounds(group, bounds, flags, sum, transform);
    }
  }

  /*! \brief Add groups like `group` in a state with `flags`: their `bounds` beside `sum` and the `transform`. */
  void AddBounds(const Group& group, const GroupClass::Bounds& bounds, uint32_t flags, double sum, double transform) {
    const double tail = group.end == segment_.end ? 0
                        : group.end > end_        ? search_.tail_bounds_[k_][search_.live_.ResultShape(group.end - 1)]
                                                  : TableAt(group.end - 1).result_tails[group.end - 1 - begin_];
    Table& table = TableAt(group.begin);
    double &begin_tail = table.begin_tails[group.begin - begin_], &late_tail = table.late_tails[group.begin - begin_];
    begin_tail = std::min(begin_tail, transform + bounds.lower_bounds[k_] + sum + tail);
    late_tail = std::min(late_tail, bounds.end_bounds[k_] + tail);
    const double* next = group.end < end_            ? Loads(group.end, search_.NextFlags(group, flags) % kFlagSets)
                         : group.end == segment_.end ? nullptr
                                                     : search_.load_bounds_[k_][group.end].data();
    double* loads = Loads(group.begin, flags);
    for (size_t i = 0; i < table.mixes; ++i) {
      double load = sum + bounds.load_bounds[first_load_bound_ + i] + (next ? next[i] : 0);
      if (group.reading->transform_resource >= 0) {
        load += transform * search_.mixes_[segment_.mixes[k_][i]][group.reading->transform_resource];
      }
      loads[i] = std::min(loads[i], load);
    }
  }

  LabelSearch& search_;
  const Segment& segment_;
  const int begin_, end_;
  int last_read_ = -1;  // position that reads a live result of the state
  // By position, the results read there, and whether an epilogue is deferred for sure: the first reader may do it, and
  // then nothing remains for others.
  std::vector<std::vector<std::pair<const LiveResult*, bool>>> reads_;
  int k_ = 0;  // the criterion
  size_t first_load_bound_ = 0;  // of the criterion, in `Expansion::load_bounds`
  std::vector<Table> shared_;  // by criterion
  Table own_;                  // of the state, up to its last reader
};

/*! \brief The groups that begin at a position, by class. */
std::vector<LabelSearch::GroupClass>& LabelSearch::FindClasses(int position) {
  std::vector<GroupClass>& classes = group_classes_[position];
  if (!classes.empty()) return classes;
  const auto key = [](const Group& group) {
    return std::make_tuple(group.reading, group.end, group.continues, group.required_mode, group.final_mode,
                           group.keeps_submission_open);
  };
  std::map<decltype(key(problem_.groups[position][0])), size_t> numbers;
  for (const Group& group : problem_.groups[position]) {
    if (!group.is_possible) continue;
    const auto [entry, is_new] = numbers.emplace(key(group), classes.size());
    if (is_new) classes.emplace_back();
    classes[entry->second].groups.push_back(&group);
  }
  return classes;
}

/*! \brief Bounds of the groups of a class with some deferred epilogues, in a state with `flags`. */
const LabelSearch::GroupClass::Bounds& LabelSearch::FindClassBounds(GroupClass& group_class, uint32_t flags,
                                                                    uint32_t deferred) {
  const auto [entry, is_new] = group_class.bounds.try_emplace(uint64_t(deferred) * kFlagSets + flags);
  GroupClass::Bounds& bounds = entry->second;
  if (!is_new) return bounds;
  bounds.lower_bounds.assign(criteria_, kInfinite), bounds.end_bounds.assign(criteria_, kInfinite);
  const Segment& segment = segments_[position_segments_[group_class.groups[0]->begin]];
  for (const Group* group : group_class.groups) {
    const Expansion& expansion = FindExpansion(*group, MakePredecessorState(*group, flags, deferred));
    if (expansion.candidates.empty()) continue;
    bounds.load_bounds.resize(expansion.load_bounds.size(), kInfinite);
    size_t i = 0;
    for (int k = 0; k < criteria_; ++k) {
      const double end_bound = group->end == segment.end ? group_end_bounds_[k][group->id * kFlagSets + flags] : 0;
      bounds.lower_bounds[k] = std::min(bounds.lower_bounds[k], expansion.lower_bounds[k] + end_bound);
      bounds.end_bounds[k] = std::min(bounds.end_bounds[k], end_bound);
      for (const size_t end = i + segment.mixes[k].size(); i < end; ++i) {
        bounds.load_bounds[i] = std::min(bounds.load_bounds[i], expansion.load_bounds[i] + end_bound);
      }
    }
  }
  return bounds;
}

LabelSearch::BucketBounds LabelSearch::LookaheadBounds(int position, const Key& key) {
  const int end = Horizon(position);
  std::shared_ptr<Lookahead>& lookahead = lookaheads_[end];
  if (!lookahead) {
    int begin = position;
    while (begin > 0 && position_segments_[begin - 1] == position_segments_[position] && Horizon(begin - 1) == end) {
      --begin;
    }
    lookahead = std::make_shared<Lookahead>(*this, begin, end);
  }
  return lookahead->Bounds(position, key);
}

}  // namespace placement
}  // namespace pimflow
