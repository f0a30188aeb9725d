/*!
 * \file order_search.h
 * \brief In which order do the steps of a program need the fewest live bytes? Search over executed sets.
 *
 * A storage is live from the first to the last step that touches it. What is live after some steps depends on
 * their set alone: bytes(A), the storages that A has begun and not finished. Moving a storage's members never
 * makes bytes(A) + bytes(B) smaller than bytes(A | B) + bytes(A & B): it is submodular. The search asks
 * whether some order stays within a limit, in layers of sets with equally many steps, and leaves out what
 * submodularity makes needless:
 *   - a step that fits within the limit and leaves no more bytes live than before may as well run at once;
 *   - from a base set, let A be the first set found, smallest number of steps first, with
 *     bytes(A) <= bytes(base). Then no set between them has fewer bytes: it would be reachable too (the way to
 *     A, restricted to it, costs no more) and would have been found before. So whatever else an order does
 *     after the base, it may do A's steps first, and A becomes the base. This takes a network apart at the
 *     places where little is live.
 * Where a layer has more sets than the given width, those with the fewest bytes stay, and a search without
 * success no longer proves anything.
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

/*! \brief Steps, numbered in an order that respects their dependencies, and the storages that they touch. */
struct StepGraph {
  struct Storage {
    int64_t bytes = 0;
    bool at_start = false, at_end = false;  // holds an input; holds an output
    std::vector<int> steps;                 // that touch it
  };
  std::vector<std::vector<int>> before, after;  // of a step: its direct dependencies, and those on it
  std::vector<std::vector<int>> touched;        // of a step: storages
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
 * \brief Bytes that every order needs: for one step after the other, the fewest that can be live while it runs.
 *
 * Of all sets that hold what the step depends on and nothing that depends on it, the one with the fewest bytes
 * is a minimum cut. Steps are looked at in falling order of their bytes in the given order, which no minimum
 * exceeds, until none can raise the bound or the time is up.
 */
int64_t LowerBound(const StepGraph& graph, Clock::time_point deadline, const std::function<void()>& poll);

enum class OrderOutcome : int64_t { kFound = 0, kNone = 1, kStopped = 2 };

class OrderSearch {
 public:
  OrderSearch(const StepGraph& graph, int64_t limit_bytes, size_t width);

  /*! \return kNone only if no order stays within the limit. */
  OrderOutcome Run(Clock::time_point deadline, const std::function<void()>& poll);

  const std::vector<int>& order() const { return order_; }
  /*! \brief The fewest bytes of a step that did not fit: below, the search would have gone the same way. */
  int64_t next_bytes() const { return next_bytes_; }
  int64_t sets() const { return sets_; }

 private:
  using Words = std::vector<uint64_t>;

  struct State {
    int64_t bytes;
    uint64_t key;
    int came_from;  // in `history_`
  };
  /*! \brief Sets of equally many steps; of each, the bits of its steps and of those that can run next. */
  struct Layer {
    std::vector<State> states;
    Words bits;
    std::unordered_map<uint64_t, int> by_key;
  };
  struct Change {
    int64_t during, after;  // bytes live
  };

  static bool Has(const uint64_t* set, int step) { return set[step >> 6] >> (step & 63) & 1; }
  static void Flip(uint64_t* set, int step) { set[step >> 6] ^= uint64_t{1} << (step & 63); }

  Change Executed(const uint64_t* done, int64_t bytes, int step) const;
  void Execute(int step, int64_t bytes_after);
  void RunWhatCostsNothing();
  void Expand(const Layer& layer, size_t index);
  void Keep(int came_from);
  void Narrow(Layer* layer);
  void Trace(int came_from);

  const StepGraph& graph_;
  const int64_t limit_;
  const size_t width_, words_;
  std::vector<uint64_t> zobrist_;

  // The set that is being made: bits as in a layer, steps that were executed since the parent.
  Words now_;
  State state_{};
  std::vector<int> moves_;

  std::map<int, Layer> layers_;  // by number of steps
  std::vector<std::pair<int, int>> history_;  // where a set came from, and the step that made it
  int executed_ = 0;             // steps in `now_`
  int found_ = -1;
  bool narrowed_ = false;
  int64_t next_bytes_, sets_ = 0;
  std::vector<int> order_;
};

}  // namespace memory
}  // namespace pimflow

#endif  // PIMFLOW_MEMORY_ORDER_SEARCH_H_
