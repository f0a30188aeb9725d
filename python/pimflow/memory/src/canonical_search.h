/*!
 * \file canonical_search.h
 * \brief Does a set of buffers with lifetimes fit below a capacity? Branch and bound over canonical plans.
 *
 * A plan can be packed until every buffer rests on address 0 or on another buffer; the search looks at such
 * plans alone. `offset_[j]` is a lower bound of the offset of buffer j, raised on the way down. A node takes
 * a buffer below whose bound no other fits any more, and
 *   places it there: every buffer that overlaps it in time lies above; or
 *   postpones it: it rests on one of those that could reach into its place, so its bound rises to the lowest
 *   of their tops. If nothing can reach into the place any more, it could as well have been placed (it
 *   falls), and that was tried before.
 * Sections are the maximal sets of buffers live at once. The lowest bound of a section and the bytes still
 * to be stacked on it must fit below the capacity; if only one of its buffers can be the lowest, the others
 * lie above it. What no buffer connects any more is solved apart. The idea of canonical plans, of section
 * bounds and of the split in time is MiniMalloc's (Moffitt, ASPLOS 2023).
 *
 * "No plan with offsets at or above these bounds" depends on nothing but the buffers left and their bounds.
 * Such failures are kept, and refuse every later node with the same buffers and no lower bounds: also after
 * a restart. This needs the order above: what is placed is searched before what is postponed.
 */
#ifndef PIMFLOW_MEMORY_CANONICAL_SEARCH_H_
#define PIMFLOW_MEMORY_CANONICAL_SEARCH_H_

#include <chrono>
#include <cstdint>
#include <functional>
#include <random>
#include <unordered_map>
#include <vector>

namespace pimflow {
namespace memory {

/*! \brief Buffers of at least one byte; sections [first, last) of each; offsets in bytes. */
struct Problem {
  struct Buffer {
    int64_t first, last;      // sections
    int64_t width;            // steps
    int64_t size;             // bytes, as asked for
    int64_t stacked;          // bytes until the next buffer can begin
    int64_t alignment;
    int64_t fixed;            // required offset, or -1
    int64_t total;            // most bytes live in any of its sections
  };
  std::vector<Buffer> buffers;
  int64_t sections = 0;
  std::vector<int64_t> spare;  // of a section: bytes of `stacked` that the topmost buffer may not need

  /*! \brief Sets stacked, total and spare; offsets are multiples of the unit that all alignments share. */
  void Prepare();
};

enum class Outcome : int64_t { kFound = 0, kNone = 1, kStopped = 2 };

class CanonicalSearch {
 public:
  using Clock = std::chrono::steady_clock;

  CanonicalSearch(const Problem& problem, int64_t capacity);

  /*!
   * \brief Search with restarts.
   * \param node_limit Nodes of all runs together.
   * \param deadline When to stop at the latest.
   * \param poll Called now and then; may throw.
   * \return kNone only if there is no plan.
   */
  Outcome Run(int64_t node_limit, Clock::time_point deadline, const std::function<void()>& poll);

  /*! \brief Offsets of the plan found. */
  const std::vector<int64_t>& offsets() const { return offset_; }
  int64_t nodes() const { return all_nodes_; }

 private:
  using Ids = std::vector<int>;  // buffers left, by first section

  struct Undo {
    int buffer;
    int64_t offset, postponed_at;
  };
  struct Failure {
    Ids ids;
    std::vector<int64_t> offsets;
  };

  bool Overlap(int a, int b) const {
    return buffers_[a].first < buffers_[b].last && buffers_[b].first < buffers_[a].last;
  }
  int64_t Top(int j) const { return offset_[j] + buffers_[j].stacked; }

  void Rank(size_t run);
  Outcome Descend(const Ids& ids);
  Outcome Branch(const Ids& ids);
  Outcome Try(const Ids& ids, int buffer);
  bool Place(const Ids& ids, int buffer);
  bool Postpone(const Ids& ids, int buffer);
  int64_t LowestSupport(const Ids& ids, int buffer, int64_t bottom) const;

  bool Settle(const Ids& ids);
  bool SettlePostponed(const Ids& ids);
  bool StackSections(const Ids& ids);
  bool RaiseAboveOnlyLowest(const Ids& ids, bool* changed);

  int Pick(const Ids& ids) const;
  int TightestSection(const Ids& ids) const;
  bool Better(int j, int than) const;
  void Span(const Ids& ids, int64_t* begin, int64_t* end) const;

  bool Raise(int buffer, int64_t bound);
  void Save(int j) { trail_.push_back({j, offset_[j], postponed_at_[j]}); }
  void UndoTo(size_t mark);
  void Blame(int64_t section, double share = 1.0);

  uint64_t Key(const Ids& ids) const;
  bool KnownFailure(uint64_t key, const Ids& ids) const;
  void KeepFailure(uint64_t key, const Ids& ids);
  bool OutOfBudget();

  const Problem& problem_;
  const std::vector<Problem::Buffer>& buffers_;
  const int64_t capacity_;
  std::vector<int64_t> offset_, postponed_at_;
  std::vector<Undo> trail_;
  std::vector<int> rank_;

  std::vector<int64_t> floor_, remaining_;  // of a section: lowest bound, bytes left
  std::vector<int64_t> candidates_;         // of a section: buffers that can be its lowest
  std::vector<int> lowest_;
  std::vector<double> weight_;  // of a section: how often it failed, later ones counting more
  double weight_step_ = 1;
  bool lowest_first_ = false;
  int64_t softness_ = 0;  // added to a section's slack when sections are compared

  std::mt19937_64 random_{1};
  std::vector<uint64_t> zobrist_;
  std::unordered_map<uint64_t, std::vector<Failure>> failures_;
  int64_t failure_bytes_ = 0;

  int64_t depth_ = 0, nodes_ = 0, run_limit_ = 0, all_nodes_ = 0, all_limit_ = 0;
  Clock::time_point deadline_;
  const std::function<void()>* poll_ = nullptr;
  bool exhausted_ = false;
};

}  // namespace memory
}  // namespace pimflow

#endif  // PIMFLOW_MEMORY_CANONICAL_SEARCH_H_
