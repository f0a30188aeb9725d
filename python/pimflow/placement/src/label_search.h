/*!
 * \file label_search.h
 * \brief Label-setting search for the best cover of the regions by candidates.
 *
 * Regions are taken in execution order. A *label* is a partial plan of all regions before a position. Its future
 * depends on a discrete state, the key of its *bucket* (which results are still read, in which layout, with which
 * deferred epilogue; how PIM's channels are used; what is open), and on a row of numbers: when each resource is free,
 * when each live result is ready, how much of the next launches is hidden, the peak of each memory pool, and sums.
 * Labels that another of their bucket dominates are dropped (`Dominates`). Numbers that cannot affect the future are
 * raised to the largest equivalent value (`RaiseTimes`), so that labels compare as equal if only such numbers differ.
 */
#ifndef PIMFLOW_PLACEMENT_LABEL_SEARCH_H_
#define PIMFLOW_PLACEMENT_LABEL_SEARCH_H_

#include <algorithm>
#include <array>
#include <chrono>
#include <ctime>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <tuple>
#include <unordered_map>
#include <utility>
#include <vector>

#include "live_results.h"
#include "problem.h"

namespace pimflow {
namespace placement {

/*! \brief A weighted sum that is minimised or bounded; a dominating label may be worse by `tolerance` of it. */
PIMFLOW_RECORD(Criterion, double, per_ns, per_pj, per_error, per_row_byte, per_filter_byte, upper_bound, tolerance);

constexpr double kRounding = 1e-9;  // values of the same plan are summed in different orders

using PoolBytes = std::array<double, kChannelSets>;  // by set of channels

/*! \brief What is asked beside the criteria; flags are 0 or 1. */
PIMFLOW_RECORD(QueryOptions, int64_t,
               counts_memory,     // one pool for each set of channels
               minimises_memory,  // criteria are bounds alone
               only_gpu,          // a plan without PIM has one pool
               front,             // all Pareto-optimal plans are required
               max_labels,        // at a position
               compared_labels);  // at a position while peaks are compared; beyond it, branch and bound
PIMFLOW_RECORD(QueryLimits, double, max_memory_bytes,
               capacity_bytes,  // of PIM's channels; infinite if no plan can exceed it
               seconds);        // time after which labels are dropped

struct Query : QueryOptions, QueryLimits {
  std::vector<Criterion> criteria;

  bool CountsTime() const {
    return std::any_of(criteria.begin(), criteria.end(), [](const Criterion& c) { return c.per_ns || c.per_pj; });
  }
};

struct Solution {
  double latency_ns, pool_bytes;
  PoolBytes peaks;
  std::vector<double> values;  // by criterion
  std::vector<int> candidates;
};

struct Result {
  std::vector<Solution> solutions;
  double bound = kInfinite;    // a lower bound of the minimised value of all plans
  double dropped_bound = kInfinite;  // the same for plans that begin with a dropped label
  int64_t labels = 0, max_labels_at_position = 0;
};

/*! \brief The end of some CPU seconds of this thread: plans do not depend on what else the machine does. */
class Deadline {
 public:
  explicit Deadline(double seconds)
      : begin_(std::chrono::steady_clock::now()), seconds_(seconds), cpu_end_seconds_(CpuSeconds() + seconds) {}
  bool IsPast() const {
    // CPU time is no longer than elapsed time, which takes much less to read.
    const std::chrono::duration<double> elapsed = std::chrono::steady_clock::now() - begin_;
    return elapsed.count() > seconds_ && CpuSeconds() > cpu_end_seconds_;
  }

 private:
  static double CpuSeconds() {
    timespec time;
    clock_gettime(CLOCK_THREAD_CPUTIME_ID, &time);
    return double(time.tv_sec) + 1e-9 * double(time.tv_nsec);
  }

  std::chrono::steady_clock::time_point begin_;
  double seconds_, cpu_end_seconds_;
};

/*!
 * \brief By group and flags before it, lower bounds of a criterion from the end of the group on, with the sums; for the
 * groups that end a segment. Searches with other bounds on memory have other sums.
 */
using Tails = std::vector<double>;
/*! \brief By criterion; null: not known. */
using SegmentTails = std::vector<std::shared_ptr<const Tails>>;

class LabelSearch {
 public:
  /*! \param segment_tails By criterion, better bounds than the search would compute; empty: it searches them. */
  LabelSearch(const Problem& problem, const Query& query, const Deadline& deadline,
              const std::function<void()>& poll, SegmentTails segment_tails);

  /*!
   * \brief Search with at most `beam` labels at a position; 0: all. After the deadline few labels are expanded.
   *
   * The search for all labels is given up, without a plan, where there are many and their bounds are far below the
   * best plan: then they would grow on and on.
   */
  Result Run(int64_t beam);
  /*! \brief Search exactly; nothing if a position has more than `limit` labels, or time is up. */
  std::optional<Result> RunExact(int64_t limit);
  /*! \brief What is minimised: the first criterion, or the pool. */
  double Value(const Solution& solution) const {
    return query_.minimises_memory ? solution.pool_bytes : solution.values[0];
  }
  /*! \brief From now on drop plans of a greater value. */
  void SetUpperBound(double value) {
    (query_.minimises_memory ? query_.max_memory_bytes : query_.criteria[0].upper_bound) = value;
  }
  /*! \brief From now on bound each pool instead of their sum: then peaks of labels are not compared. */
  void BoundPools(const PoolBytes& max_bytes) { sums_pools_ = false, max_pool_bytes_ = max_bytes; }
  /*! \brief Bounds of the first criterion after its segments. */
  Tails GroupEndBounds() const;
  bool IsTimeUp() const { return deadline_.IsPast(); }

 private:
  // Bits of the first word of a key; above them, the alternative of the layer that is open. At the begin PIM's channels
  // are in the mode of PIM; a switch back to it at the end is not charged, as in the evaluator.
  static constexpr uint32_t kPlainMemoryMode = 1, kOpenSubmission = 2, kAwaitedResult = 4, kUsedPlainMemory = 8;
  static constexpr uint32_t kOpenLayerShift = 4, kFlagSets = 4;  // of the first two flags
  static constexpr uint32_t kSegmentFlags = ~(kAwaitedResult | kUsedPlainMemory);  // that bounds of segments know
  using Key = std::u32string;
  struct Origin { int trace, candidate; };
  struct Trace { int previous, candidate; };
  /*! \brief Entry `target` of a row is raised to the minimum of some maxima of entry + ns. */
  struct RaiseRule {
    int target;
    std::vector<std::vector<std::pair<int, double>>> maxima;
  };
  struct Bucket {
    Key key;
    int position, slots, width;
    size_t filtered = 0;  // the first labels, of which none dominates another
    std::vector<double> rows;
    std::vector<Origin> origins;
    const std::vector<RaiseRule>* raise_rules;
    std::vector<int> shapes;
    std::vector<double> tails;  // by slot and criterion
  };
  /*! \brief A group's candidates in a context, and by criterion a lower bound over all of them. */
  struct Expansion {
    PredecessorState predecessor;
    std::vector<ExpandedCandidate> candidates;
    std::vector<double> lower_bounds, load_bounds;
  };
  /*! \brief Groups of a position that the lookahead knows apart by their costs alone. */
  struct GroupClass {
    /*! \brief By criterion, lower bounds of the groups, what follows the segment included; of that alone; and loads. */
    struct Bounds {
      std::vector<double> lower_bounds, end_bounds, load_bounds;
    };
    std::vector<const Group*> groups;
    std::unordered_map<uint64_t, Bounds> bounds;  // by deferred epilogues and flags
  };
  /*! \brief The positions up to and with a narrow one; by criterion the mixes of resources with the best bounds. */
  struct Segment {
    int begin, end;
    std::vector<std::vector<int>> mixes;
    bool is_unprovable = false;  // a search bounds no better than a lookahead
  };
  /*! \brief By criterion, lower bounds from each slot to the end, and for each mix of the segment. */
  struct BucketBounds {
    std::vector<std::vector<double>> tails, loads;
  };
  /*! \brief A group in a state: the key after it, the sources of its entries, and costs of the transition. */
  struct GroupTransition {
    Key key;
    std::vector<int> source_slots;  // by slot of the new key, that of the old key; -1: of the group
    std::vector<std::pair<int, bool>> operand_slots;  // of the old key, and whether the operand may be late
    double transform_ns, transform_pj;
    uint32_t deferred;
    bool is_late;
    PoolBytes resident_bytes, input_bytes, output_bytes;
    std::vector<std::tuple<int, int, double, bool>> copies;  // order, set, bytes, whether the source stays live

    /*! \brief Forget all but the memory of the vectors: transitions are made very often. */
    void Clear() {
      key.clear(), source_slots.clear(), operand_slots.clear(), copies.clear();
      transform_ns = transform_pj = 0, deferred = 0, is_late = false;
      resident_bytes = input_bytes = output_bytes = {};
    }
  };

  /*! \brief A group in a state, while the labels of a bucket are expanded. */
  struct GroupExpansion {
    const Group& group;
    const GroupTransition& transition;
    const std::vector<ExpandedCandidate>& candidates;
    bool follows;
    Bucket* targets[4];  // by whether the result is awaited, and whether plain memory was used; null: no label yet
  };
  /*! \brief When the inputs are ready that the tasks of a group wait for, and all that its result waits for. */
  struct InputTimes {
    double begin_ns, late_ns;
  };
  class TransitionBuilder;  // transition.cc
  class Lookahead;          // lookahead.cc

  // bounds.cc
  void PrepareBounds();
  void PrepareGroupBounds(int groups);
  void PrepareResourceUses();
  void PreparePoolBounds();
  std::array<double, 4> LiveBytes(const Group& group) const;
  void MakeSegments();
  void MakeMixes(std::vector<int>& parts, int resource, int parts_left);
  void PrepareSegment(int s);
  bool MayApplyEarlierEpilogues(const Segment& segment) const;  // segment_search.cc
  double SearchSegment(int s, const Key& key);
  void ChooseMixes(Segment& segment, int k) const;
  void AddGroupLoads(const Segment& segment, const Group& group, int k, ResultId result, std::vector<double>& loads);
  void SetPositionLoads(const Segment& segment, int u, int k);
  void MarkUses(const Task& task, std::vector<char>& uses) const;
  /*! \brief From a result: lower bounds of the time until groups begin at `first` and at each later position. */
  struct Delays {
    int first = 0;
    std::vector<double> begins_ns;
  };
  double DelayBound(int shape, int position);
  void ComputeDelays(int shape, Delays& delays);
  double TailBound(int shape, int k);
  double LoadBound(const Expansion& expansion, int k, const std::vector<double>& mix) const;
  void SetLoadBounds(const Group& group, Expansion& expansion) const;
  int Horizon(int position) const;                             // lookahead.cc
  std::vector<GroupClass>& FindClasses(int position);
  const GroupClass::Bounds& FindClassBounds(GroupClass& group_class, uint32_t flags, uint32_t deferred);
  BucketBounds LookaheadBounds(int position, const Key& key);
  BucketBounds TableBounds(int position, const Bucket& bucket) const;
  /*! \brief Whether a plan may contain a group. */
  bool CanComplete(const Group& group, int k) const { return sum_bounds_[k][group.end] < kInfinite; }
  double SumBoundChange(const Group& group, int k) const {
    return sum_bounds_[k][group.end] - sum_bounds_[k][group.begin];
  }
  /*! \brief The result of a group as it is after the group; 0: nobody needs it. */
  ResultId NextResult(const Group& group) const {
    return live_.AdvanceResult(live_.FindResult(group.end - 1, group.layout, NextDeferral(group)), group.end);
  }
  Key NextKey(const Group& group, uint32_t flags) const;
  static uint64_t SegmentKey(const Key& key) { return uint64_t(key[0]) << 32 | (key.size() > 1 ? key[1] : 0); }
  uint32_t NextFlags(const Group& group, uint32_t flags) const;
  Deferral NextDeferral(const Group& group) const {
    return !group.defers_epilogue ? kDone : pools_ && group.leaves_partial_sum ? kPartialSum : kEpilogue;
  }
  PredecessorState MakePredecessorState(const Group& group, uint32_t flags, uint32_t deferred) const;
  double LowerBound(int position, const Bucket& bucket, const double* row, int k) const;
  double LowerBound(int position, const Bucket& bucket, const BucketBounds& bounds, const double* row, int k) const;

  void AddSums(ExpandedCandidate& expanded) const;
  const Expansion& FindExpansion(const Group& group, const PredecessorState& predecessor);
  Bucket& FindBucket(int position, const Key& key);
  void MakeRaiseRules(int position, const Bucket& bucket, std::vector<RaiseRule>& raise_rules);
  void RaiseTimes(const Bucket& bucket, double* row) const;
  bool Dominates(const Bucket& bucket, const double* x, const double* y, bool with_tolerance) const;
  void AddLabel(int position, Bucket& bucket, double* row, const Origin& origin);
  double SortKey(const Bucket& bucket, const double* row) const;
  void DropDominatedLabels(Bucket& bucket);
  void KeepLabels(Bucket& bucket, const std::vector<char>& is_kept) const;
  static void MoveLabel(Bucket& bucket, size_t from, size_t to);
  static void Truncate(Bucket& bucket, size_t count);
  bool CanBeRead(const Key& key);
  bool MakeTransition(const Bucket& bucket, const Group& group, GroupTransition& transition);
  void ExpandBucket(int position, const Bucket& bucket);
  void ExpandLabel(const Bucket& bucket, size_t label, GroupExpansion& expansion);
  InputTimes FindInputTimes(const double* row, const GroupExpansion& expansion) const;
  Bucket& FindTarget(GroupExpansion& expansion, const ExpandedCandidate& expanded, bool is_awaited);
  void AppendResultTimes(const Bucket& bucket, const double* x, const GroupExpansion& expansion, double end_ns);
  void AppendQueues(const double* hidden_ns, const ExpandedCandidate& expanded, bool follows, bool is_awaited);
  bool AppendPeaks(const Group& group, const GroupTransition& transition, const ExpandedCandidate& expanded,
                   const Key& key, const double* sums);
  using RankedLabel = std::tuple<double, size_t, size_t>;  // of a label: its lower value, bucket and number
  size_t CountLabels(int position) const;
  void KeepBestLabels(int position, std::vector<RankedLabel>& order, size_t limit);
  void LimitLabels(int position, size_t limit);
  void PreparePosition(int position, int64_t beam);
  void ClearLabels();
  void AddFirstLabel(int position, const Key& key, double hidden_ns);
  void ExpandPositions(int begin, int end, int64_t beam);
  bool GivesUp(int position, const std::vector<RankedLabel>& order);
  double ValueBound(int position, const Bucket& bucket, const BucketBounds& bounds, const double* row) const;
  Solution MakeSolution(const Bucket& bucket, size_t label) const;

  const Problem& problem_;
  Query query_;
  const Deadline deadline_;
  const std::function<void()>& poll_;
  LiveResults live_;
  const int positions_, resources_, criteria_, pools_;
  bool has_capacity_;
  const SegmentTails segment_tails_;
  bool sums_pools_ = true;
  PoolBytes max_pool_bytes_{};

  std::vector<std::vector<const Group*>> ending_groups_;  // by position
  std::vector<char> is_straddled_;                  // by position, whether a group begins before and ends after it
  std::vector<std::vector<char>> uses_resource_;    // by position and resource
  std::vector<std::vector<double>> sum_bounds_;     // by criterion and position, lower bound of sums without time
  std::vector<std::vector<double>> group_bounds_;   // by criterion and group, lower bound beyond `sum_bounds_`
  std::vector<std::vector<double>> mixes_;          // of resources, as weights that sum to 1
  std::vector<Segment> segments_;
  std::vector<int> position_segments_;  // by position
  std::vector<std::vector<GroupClass>> group_classes_;  // by position
  std::vector<std::shared_ptr<Lookahead>> lookaheads_;  // by horizon
  // By criterion, lower bounds: from a position on, for each mix of its segment; the same by the last result before it;
  // after a group that ends a segment, for each of the flags before it; and after narrow positions, by flags and result.
  std::vector<std::vector<std::vector<double>>> load_bounds_;
  std::vector<std::vector<std::map<ResultId, std::vector<double>>>> result_loads_;
  std::vector<std::vector<double>> group_end_bounds_;
  std::vector<std::unordered_map<uint64_t, std::vector<double>>> segment_bounds_;
  std::vector<double> pool_bounds_, candidate_bytes_;  // lower bounds of the pools from a position, or candidate, on
  std::vector<char> can_continue_, can_follow_;    // by position, whether a group that begins there does
  std::vector<double> min_ns_;                     // by group, lower bound of its time
  std::vector<std::deque<Expansion>> expansions_;  // by group
  std::vector<Delays> delays_;                     // by shape
  std::vector<std::vector<double>> tail_bounds_;   // by criterion and shape: see `TailBound`
  std::vector<std::unordered_map<Key, int>> bucket_index_;
  std::vector<std::deque<Bucket>> buckets_;
  std::vector<std::map<std::vector<int>, std::vector<RaiseRule>>> raise_rules_;  // by position and shapes of a bucket
  std::vector<size_t> added_labels_;  // by position, labels at the last count and offers since
  std::vector<Trace> traces_;
  std::vector<double> row_;
  std::vector<std::pair<ResultId, int>> next_slots_;  // while a transition is made
  std::vector<std::pair<int, ResultId>> restricted_reads_;
  bool stops_at_drop_ = false, is_given_up_ = false;
  double dropped_bound_ = kInfinite;  // lower bound of the value of plans whose labels were dropped
  Result result_;
};

/*! \brief Tails of criteria: by a search of every segment, for each state before it (segment_search.cc). */
class TailCache {
 public:
  /*! \brief Tails of the criteria of a query; if it `searches`, also of those for which none are known. */
  SegmentTails Find(const Problem& problem, const Query& query, const Deadline& deadline,
                    const std::function<void()>& poll, bool searches);

 private:
  struct Entry {
    Criterion criterion;
    bool only_gpu;
    std::shared_ptr<const Tails> tails;
  };
  std::shared_ptr<const Tails> Interpolate(const Criterion& criterion, bool only_gpu) const;
  std::mutex mutex_;
  std::vector<Entry> entries_;
};

/*! \brief Makes the search of a query, which `searches` tails or takes those that are known. */
using MakeSearch = std::function<std::unique_ptr<LabelSearch>(bool searches)>;

/*! \brief The best plan by searches with tighter and tighter bounds, and a lower bound of all plans (minimise.cc). */
Result Minimise(const MakeSearch& make_search, const Query& query);

}  // namespace placement
}  // namespace pimflow
#endif  // PIMFLOW_PLACEMENT_LABEL_SEARCH_H_
