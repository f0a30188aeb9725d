/*!
 * \file order_search.h
 * \brief In which order do the steps of a program need the fewest live bytes? Search over executed sets.
 *
 * A storage is live from the first to the last step that touches it. What is live after some steps depends on
 * their set alone: bytes(A), the storages that A has begun and not finished. It is submodular: bytes(A | B) +
 * bytes(A & B) <= bytes(A) + bytes(B). The search asks whether some order stays within a limit, in layers of
 * sets with equally many steps. What submodularity makes needless is left out:
 *
 *   If a set A can be reached from a set S within the limit, and no set between the two (the dependencies
 *   kept) has fewer bytes than A, then whatever order goes on from S may as well do A's steps first. For its
 *   sets X, bytes(X | A) <= bytes(X) + bytes(A) - bytes(X & A) <= bytes(X), and the same holds for what is
 *   live while a step runs.
 *
 * So the search goes to A alone, and not to all that follows S, where
 *   - A is S and one step, and has no more bytes than S;
 *   - A is S and one step with later ones that it makes possible, and has no more bytes than S;
 *   - A is any set found after the last such S that all others were dropped for, with no more bytes than S. A
 *     minimum cut tells whether a set between has fewer; if so it is taken instead: the way to A, without
 *     the steps that it has not, leads there within the limit. This takes a network apart where little is live.
 *
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

/*! \brief Whether a step is in a set. */
enum class Side : char { kIn, kOut, kFree };

/*!
 * \brief The fewest bytes of the sets that `sides` leaves open and the dependencies allow: a minimum cut.
 * \param sides Of every step; set to a set with the fewest bytes, of those the smallest.
 * \param running A step that is out of the set and whose storages all count; -1 for none.
 */
int64_t FewestBytes(const StepGraph& graph, int running, std::vector<Side>* sides);

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
    int64_t bytes = 0;
    uint64_t key = 0;
    int steps = 0;
    int came_from = -1;  // in `history_`
  };
  struct Set {
    State state;
    Words bits;              // of its steps, then of those that can run next
    std::vector<int> moves;  // its last steps, which are not in `history_` yet
  };
  /*! \brief Sets of equally many steps; `bits` as in `Set`. */
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
  bool OnlyWay(const State& from) const;
  void Rebase(const Layer& layer, size_t index);
  void Keep();
  void Narrow(Layer* layer);
  std::vector<int> Trace(int came_from) const;

  const StepGraph& graph_;
  const int64_t limit_;
  const size_t width_, words_;
  std::vector<uint64_t> zobrist_;

  Set now_;   // being made
  Set base_;  // the last one that all others were dropped for
  std::vector<Set> children_;
  std::map<int, Layer> layers_;  // by number of steps
  std::vector<std::pair<int, int>> history_;  // where a set came from, and the step that made it
  std::vector<Words> follows_;  // of a step: those that depend on it, directly or not
  int found_ = -1;
  bool narrowed_ = false;
  int64_t next_bytes_, sets_ = 0;
  std::vector<int> order_;
};

}  // namespace memory
}  // namespace pimflow

#endif  // PIMFLOW_MEMORY_ORDER_SEARCH_H_
