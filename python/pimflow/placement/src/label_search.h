/*!
 * \file label_search.h
 * \brief Label-setting search for the best cover of the regions by candidates.
 *
 * Regions are taken in execution order. A *label* is a partial plan of all regions before a position. Its future
 * depends on a discrete state, the key of its *bucket* (which results are still read, in which layout, with which
 * deferred epilogue; how PIM's channels are used; what is open), and on a row of numbers: when each resource is free,
 * when each live result is ready, how much of the next launches is hidden, the peak of each memory pool, and sums.
 * Labels that another of their bucket dominates are dropped (`Dominates`). Numbers that cannot affect the future are
 * raised to the largest equivalent value (`Raise`), so that labels compare as equal if only such numbers differ.
 */
#ifndef PIMFLOW_PLACEMENT_LABEL_SEARCH_H_
#define PIMFLOW_PLACEMENT_LABEL_SEARCH_H_

#include <algorithm>
#include <array>
#include <chrono>
#include <deque>
#include <functional>
#include <map>
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
struct Criterion {
  double per_ns, per_pj, per_error, per_row_byte, per_filter_byte, at_most, tolerance;
};

using PoolBytes = std::array<double, kChannelSets>;  // by set of channels

struct Question {
  std::vector<Criterion> criteria;
  bool counts_memory;       // one pool for each set of channels
  bool minimises_memory;    // criteria are bounds alone
  bool only_gpu;            // a plan without PIM has one pool
  double max_memory_bytes;
  double capacity_bytes;    // of PIM's channels; infinite if no plan can exceed it
  int64_t max_labels;       // at a position
  int64_t compared_labels;  // at a position while peaks are compared; beyond it, branch and bound
  double seconds;           // time after which labels are dropped

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
  double dropped = kInfinite;  // the same for plans that begin with a dropped label
  int64_t labels = 0, most_labels = 0;
};

using Clock = std::chrono::steady_clock;

class LabelSearch {
 public:
  LabelSearch(const Problem& problem, const Question& question, Clock::time_point deadline, const std::function<void()>& poll);

  /*!
   * \brief Search with at most `beam` labels at a position; 0: all. After the deadline few labels are expanded, or none
   *   if a plan is known.
   */
  Result Run(int64_t beam, bool plan_is_known);
  /*! \brief Search exactly; nothing if a position has more than `limit` labels, or time is up. */
  std::optional<Result> RunWhole(int64_t limit);
  /*! \brief What is minimised: the first criterion, or the pool. */
  double Value(const Solution& solution) const {
    return question_.minimises_memory ? solution.pool_bytes : solution.values[0];
  }
  /*! \brief From now on drop plans of a greater value. */
  void SetMost(double value) {
    (question_.minimises_memory ? question_.max_memory_bytes : question_.criteria[0].at_most) = value;
  }
  /*! \brief From now on bound each pool instead of their sum: then peaks of labels are not compared. */
  void BoundPools(const PoolBytes& most) { adds_pools_ = false, pool_most_ = most; }
  bool IsLate() const { return Clock::now() > deadline_; }

 private:
  // Bits of the first word of a key; above them, the alternative of the layer that is open.
  static constexpr uint32_t kPlainMemoryMode = 1, kSubmissionOpen = 2, kAwaited = 4, kUsedPlainMemory = 8;
  static constexpr uint32_t kOpensShift = 4, kFlagSets = 4;  // of the first two flags
  using Key = std::u32string;
  struct Origin { int trace, candidate; };
  struct Trace { int previous, candidate; };
  /*! \brief Entry `target` of a row is raised to the minimum of some maxima of entry + ns. */
  struct Lift { int target; std::vector<std::vector<std::pair<int, double>>> maxima; };
  struct Bucket {
    Key key;
    int position, slots, width;
    size_t filtered = 0;  // the first labels, of which none dominates another
    std::vector<double> rows;
    std::vector<Origin> origins;
    const std::vector<Lift>* lifts;
    std::vector<int> shapes;
    std::vector<double> tails;  // by slot and criterion
  };
  /*! \brief A group's candidates in a context, and by criterion a lower bound over all of them. */
  struct Expansion { Context context; std::vector<Expanded> candidates; std::vector<double> weights, work; };
  /*! \brief The positions up to and with a narrow one; by criterion the mixes of resources with the best bounds. */
  struct Segment { int begin, end; std::vector<std::vector<int>> mixes; };
  /*! \brief By criterion, lower bounds from each slot to the end, and for each mix of the segment. */
  struct StrongBounds { std::vector<std::vector<double>> tails, loads; };
  /*! \brief A group in a state: the key after it, the sources of its entries, and costs of the transition. */
  struct Step {
    Key key;
    std::vector<int> from;  // by slot of the new key, that of the old key; -1: of the group
    double move_ns, move_pj;
    uint32_t deferred;
    bool late;
    double always[kChannelSets], read[kChannelSets], written[kChannelSets];
    std::vector<std::tuple<int, int, double, bool>> copies;  // order, set, bytes, whether the source stays live
  };

  // bounds.cc
  void PrepareBounds();
  void PrepareFuturePeaks();
  bool FitsAnyFuture(int position, const double* peaks) const;
  void MakeMixes(std::vector<int>& parts, int resource, int left);
  /*! \brief From a result: lower bounds of the time until groups begin at `first` and at each later position. */
  struct Ways { int first = 0; std::vector<double> begins_ns; };
  void AddSums(Expanded& expanded) const;
  void MarkUses(const Task& task, std::vector<char>& uses) const;
  double Way(int shape, int position);
  void FindWays(int shape, Ways& ways);
  double Tail(int shape, int k);
  double Work(const Expansion& expansion, int k, const std::vector<double>& mix) const;
  void FindWork(const Group& group, Expansion& expansion) const;
  void PrepareSegment(int s);
  StrongBounds Strong(int position, const Key& key);
  StrongBounds WeakBounds(int position, const Bucket& bucket) const;
  uint32_t FlagsBehind(const Group& group, uint32_t flags) const;
  Deferral DeferralBehind(const Group& group) const {
    return !group.defers ? kDone : pools_ && group.leaves_sum ? kPartialSum : kEpilogue;
  }
  Context ContextOf(const Group& group, uint32_t flags, uint32_t deferred) const;
  double LowerBound(int position, const Bucket& bucket, const double* row, int k) const;
  double LowerBound(int position, const Bucket& bucket, const StrongBounds& strong, const double* row, int k) const;

  const Expansion& ExpandedIn(const Group& group, const Context& context);
  void LeaveOutDominated(std::vector<Expanded>& expanded) const;
  Bucket& BucketAt(int position, const Key& key);
  void MakeLifts(int position, const Bucket& bucket, std::vector<Lift>& lifts);
  void Raise(const Bucket& bucket, double* row) const;
  bool Dominates(const Bucket& bucket, const double* x, const double* y, bool nearly) const;
  void Offer(int position, Bucket& bucket, double* row, const Origin& origin);
  double Worth(const Bucket& bucket, const double* row) const;
  void Filter(Bucket& bucket);
  void Keep(Bucket& bucket, const std::vector<char>& keeps) const;
  static void MoveLabel(Bucket& bucket, size_t from, size_t to);
  static void Truncate(Bucket& bucket, size_t count);
  bool MeetGroup(const Bucket& bucket, const Group& group, Step& step);
  void Expand(int position, const Bucket& bucket);
  void ExpandLabel(int position, const Bucket& bucket, size_t label, const Group& group, const Step& step,
                   const std::vector<Expanded>& expanded, bool follows, Bucket** targets);
  bool AppendPeaks(const Group& group, const Step& step, const Expanded& expanded, const double* peaks, const Key& key,
                   const double* sums, std::vector<double>& row) const;
  using Place = std::tuple<double, size_t, size_t>;  // of a label: its lower value, bucket and number
  size_t CountLabels(int position) const;
  void KeepBest(int position, std::vector<Place>& order, size_t limit);
  void KeepToMemory(int position);
  void Arrive(int position, int64_t beam);
  double LowerValue(int position, const Bucket& bucket, const StrongBounds& strong, const double* row) const;
  void Drop(int position, const Bucket& bucket);
  Solution SolutionOf(const Bucket& bucket, size_t label) const;

  const Problem& problem_;
  Question question_;
  const Clock::time_point deadline_;
  const std::function<void()>& poll_;
  LiveResults live_;
  const int positions_, resources_, criteria_, pools_;
  bool capacity_;
  bool adds_pools_ = true;
  PoolBytes pool_most_{};

  std::vector<char> straddled_;                     // by position, whether a group begins before and ends after it
  std::vector<std::vector<char>> uses_;             // by position and resource
  std::vector<std::vector<double>> rest_;           // by criterion and position, lower bound of sums without time
  std::vector<std::vector<double>> weights_;        // by criterion and group, lower bound beyond `rest_`
  std::vector<std::vector<double>> mixes_;          // of resources, as weights that sum to 1
  std::vector<Segment> segments_;
  std::vector<int> segment_at_;                     // by position
  // By criterion, lower bounds: from a position on, for each mix of its segment; after a group that ends a segment,
  // for each of the flags before it; and after narrow positions, by flags and result.
  std::vector<std::vector<std::vector<double>>> loads_;
  std::vector<std::vector<double>> behind_group_;
  std::vector<std::unordered_map<uint64_t, std::vector<double>>> behind_narrow_;
  std::vector<char> may_continue_, may_follow_;     // by position, whether a group that begins there does
  std::vector<double> least_ns_;                    // by group, lower bound of its time
  std::vector<std::deque<Expansion>> expanded_;     // by group
  std::vector<Ways> ways_;                          // by shape
  std::vector<std::vector<double>> tails_;          // by criterion and shape: see `Tail`
  std::vector<std::unordered_map<Key, int>> index_;
  std::vector<std::deque<Bucket>> buckets_;
  std::vector<std::map<std::vector<int>, std::vector<Lift>>> lifts_;  // by position and shapes of a bucket
  std::vector<size_t> offered_;                     // by position, labels at the last count and offers since
  std::vector<Trace> traces_;
  std::vector<PoolBytes> future_peaks_;             // by position, upper bounds of all later peaks
  std::vector<double> row_;
  bool ends_at_loss_ = false;
  double lost_ = kInfinite;  // lower bound of the value of plans whose labels were dropped
  Result result_;
};

}  // namespace placement
}  // namespace pimflow
#endif  // PIMFLOW_PLACEMENT_LABEL_SEARCH_H_
