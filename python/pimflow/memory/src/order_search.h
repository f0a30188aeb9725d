/*!
 * \file order_search.h
 * \brief Search for an order of a program's steps with the fewest live bytes, over sets of executed steps.
 *
 * A storage is live from the first to the last step that touches it. The bytes that are live after some steps
 * depend only on the set A of these steps: bytes(A) is the sum of the storages that A has begun but not
 * finished. This function is submodular: bytes(A | B) + bytes(A & B) <= bytes(A) + bytes(B). The search
 * decides whether an order stays within a limit. It goes through layers; a layer has sets of equally many
 * steps. Submodularity allows it to skip sets:
 *
 *   Let a set A be reachable from a set S within the limit, and let no set between the two that respects the
 *   dependencies have fewer bytes than A. Then any order that continues from S can do A's steps first: for
 *   each of its sets X, bytes(X | A) <= bytes(X) + bytes(A) - bytes(X & A) <= bytes(X). The same holds for
 *   the bytes that are live while a step runs.
 *
 * So the search continues from A only, and drops all other successors of S, where
 *   - A is S and one step, and has no more bytes than S;
 *   - A is S, one step, and later steps that become possible by it, and has no more bytes than S;
 *   - S is the base, which is the last set for which all others were dropped, and A is any later set that has
 *     no more bytes than S. A minimum cut says whether a set between them has fewer bytes than A. If so, the
 *     search continues from that set instead: the order that led to A, without the steps that are not in that
 *     set, leads to it within the limit. This splits a network at the places where few bytes are live.
 *
 * If a layer has more sets than the given width, it keeps those with the fewest bytes. From then on, a search
 * that finds nothing proves nothing.
 */
#ifndef PIMFLOW_MEMORY_ORDER_SEARCH_H_
#define PIMFLOW_MEMORY_ORDER_SEARCH_H_

#include <chrono>
#include <cstdint>
#include <functional>
#include <map>
#include <random>
#include <unordered_map>
#include <utility>
#include <vector>

namespace pimflow {
namespace memory {

/*! \brief Steps, numbered in an order that respects their dependencies, and the storages of each. */
struct StepGraph {
  struct Storage {
    int64_t bytes = 0;
    bool at_start = false, at_end = false;  // holds an input; holds an output
    std::vector<int> steps;                 // steps that touch it
  };
  std::vector<std::vector<int>> before, after;  // by step: its direct dependencies, and its direct dependents
  std::vector<std::vector<int>> touched;        // by step: its storages
  std::vector<Storage> storages;

  int steps() const { return static_cast<int>(before.size()); }
  int64_t BytesAtStart() const;
  /*! \brief The same program backwards in time: its orders are the reversed ones, with the same peaks. */
  StepGraph Reversed() const;
  /*! \brief Bytes live during each step of `order`. */
  std::vector<int64_t> LiveBytes(const std::vector<int>& order) const;
};

using Clock = std::chrono::steady_clock;

/*!
 * \brief Lower bound of the peak of all orders: the maximum, over steps, of the fewest bytes live meanwhile.
 *
 * The set before the step contains all that the step depends on and nothing that depends on it. A minimum cut
 * finds the one with the fewest bytes. Steps are tried by falling live bytes in the original order, which are
 * an upper bound of each minimum, until no step can raise the bound or the time is up.
 */
int64_t LowerBound(const StepGraph& graph, Clock::time_point deadline, const std::function<void()>& poll);

/*! \brief Whether a step has to be in a set, must not be in it, or may be. */
enum class Side : char { kIn, kOut, kFree };

/*!
 * \brief The fewest bytes of all sets that agree with `sides` and respect the dependencies, by a minimum cut.
 * \param sides By step. Overwritten by the smallest set with the fewest bytes.
 * \param running A step that is not in the set, but whose storages all count as live; -1 for none.
 */
int64_t MinLiveBytes(const StepGraph& graph, int running, std::vector<Side>* sides);

enum class OrderOutcome : int64_t { kFeasible = 0, kInfeasible = 1, kStopped = 2 };

class OrderSearch {
 public:
  OrderSearch(const StepGraph& graph, int64_t limit_bytes, size_t width);

  /*! \return kInfeasible only if it is proved that no order stays within the limit. */
  OrderOutcome Run(Clock::time_point deadline, const std::function<void()>& poll);

  const std::vector<int>& order() const { return order_; }
  /*! \brief The fewest bytes of a step that did not fit: with any limit below, the search is the same. */
  int64_t next_bytes() const { return next_bytes_; }
  int64_t sets() const { return sets_; }

 private:
  using Words = std::vector<uint64_t>;

  struct State {
    int64_t bytes = 0;
    uint64_t key = 0;
    int steps = 0;
    int history_index = -1;  // index in `history_`
  };
  struct Set {
    State state;
    Words bits;              // its steps, then the steps that can run next
    std::vector<int> moves;  // its last steps that are not yet in `history_`
  };
  /*! \brief Sets of equally many steps; `bits` as in `Set`. */
  struct Layer {
    std::vector<State> states;
    Words bits;
    std::unordered_map<uint64_t, int> by_key;
  };
  struct LiveChange {
    int64_t during, after;  // bytes live
  };

  static bool Contains(const uint64_t* set, int step) { return set[step >> 6] >> (step & 63) & 1; }
  static void Flip(uint64_t* set, int step) { set[step >> 6] ^= uint64_t{1} << (step & 63); }

  LiveChange ExecutionChange(const uint64_t* done, int64_t bytes, int step) const;
  void Execute(int step, int64_t bytes_after);
  void RunFreeSteps();
  void Expand(const Layer& layer, size_t index);
  bool DominatesSiblings(const State& from) const;
  void Rebase(const Layer& layer, size_t index);
  void StoreSet();
  void DropSets(Layer* layer);
  std::vector<int> Trace(int history_index) const;

  const StepGraph& graph_;
  const int64_t limit_;
  const size_t width_, words_;
  std::vector<uint64_t> zobrist_;

  Set current_;  // the set that is being built
  Set base_;  // the last set for which all others were dropped
  std::vector<Set> children_;
  std::map<int, Layer> layers_;  // by number of steps
  std::vector<std::pair<int, int>> history_;  // index of the predecessor, and the step that was added
  std::vector<Words> descendants_;            // by step: the steps that depend on it, directly or not
  int complete_index_ = -1;
  bool has_dropped_sets_ = false;
  int64_t next_bytes_, sets_ = 0;
  std::vector<int> order_;
};

}  // namespace memory
}  // namespace pimflow

#endif  // PIMFLOW_MEMORY_ORDER_SEARCH_H_
