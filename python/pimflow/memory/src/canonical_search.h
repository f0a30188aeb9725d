/*!
 * \file canonical_search.h
 * \brief Decides whether buffers with lifetimes fit below a capacity: branch and bound over canonical plans.
 *
 * Any plan can be packed: every buffer then rests on address 0 or on another buffer. The search considers
 * only such plans. `offset_[j]` is a lower bound of the offset of buffer j, and rises with the depth of the
 * search. A node selects a buffer such that no other buffer fits below its bound, and either
 *   places it at the bound: every buffer that overlaps it in time lies above it; or
 *   postpones it: it then rests on a buffer that can reach into that place, so that its bound rises to the
 *   lowest top of these. If no buffer can reach into the place any more, the postponed buffer would fall into
 *   it, and placing it there was tried before.
 * Sections are the maximal sets of buffers that are live at once. The lowest bound in a section plus the
 * bytes still to be stacked on it must fit below the capacity. If only one buffer of a section can be its
 * lowest, all others lie above it. Buffers that are in separate parts of the time are solved separately.
 * Canonical plans, section bounds and the split in time are ideas of MiniMalloc (Moffitt, ASPLOS 2023).
 *
 * Whether there is a plan with offsets at or above the bounds depends only on the remaining buffers and their
 * bounds. Failures are stored, and prune every later node that has the same buffers and bounds that are not
 * lower, also after a restart. This requires the order above: placing is tried before postponing.
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
    int64_t size;             // bytes, as requested
    int64_t stacked;          // bytes until the next buffer can begin
    int64_t alignment;
    int64_t fixed;            // required offset, or -1
    int64_t total;            // maximum of live bytes over its sections
  };
  std::vector<Buffer> buffers;
  int64_t sections = 0;
  std::vector<int64_t> spare;  // by section: bytes of `stacked` that the topmost buffer may not need

  /*! \brief Sets stacked, total and spare; offsets are multiples of the unit that divides all alignments. */
  void Prepare();
};

enum class Outcome : int64_t { kFeasible = 0, kInfeasible = 1, kStopped = 2 };

class CanonicalSearch {
 public:
  using Clock = std::chrono::steady_clock;

  CanonicalSearch(const Problem& problem, int64_t capacity);

  /*!
   * \brief Search with restarts.
   * \param node_limit Nodes of all runs together.
   * \param deadline When to stop.
   * \param poll Called regularly; may throw.
   * \return kInfeasible only if it is proved that there is no plan.
   */
  Outcome Run(int64_t node_limit, Clock::time_point deadline, const std::function<void()>& poll);

  /*! \brief Offsets of the plan found. */
  const std::vector<int64_t>& offsets() const { return offset_; }
  int64_t nodes() const { return all_nodes_; }

 private:
  using Ids = std::vector<int>;  // remaining buffers, by first section

  struct TrailEntry {
    int buffer;
    int64_t offset, postponed_at;
  };
  struct Failure {
    Ids ids;
    std::vector<int64_t> offsets;
  };

  bool OverlapInTime(int a, int b) const {
    return buffers_[a].first < buffers_[b].last && buffers_[b].first < buffers_[a].last;
  }
  int64_t Top(int j) const { return offset_[j] + buffers_[j].stacked; }

  void SetStrategy(size_t run);
  Outcome Descend(const Ids& ids);
  Outcome Branch(const Ids& ids);
  Outcome PlaceAndDescend(const Ids& ids, int buffer);
  bool Place(const Ids& ids, int buffer);
  bool Postpone(const Ids& ids, int buffer);
  int64_t LowestSupport(const Ids& ids, int buffer, int64_t bottom) const;

  bool PropagateBounds(const Ids& ids);
  bool RaisePostponed(const Ids& ids);
  bool StackSections(const Ids& ids);
  bool RaiseAboveOnlyLowest(const Ids& ids, bool* changed);

  int ChooseBuffer(const Ids& ids) const;
  int TightestSection(const Ids& ids) const;
  bool IsBefore(int j, int best) const;
  void FindSpan(const Ids& ids, int64_t* begin, int64_t* end) const;

  bool Raise(int buffer, int64_t bound);
  void Save(int j) { trail_.push_back({j, offset_[j], postponed_at_[j]}); }
  void Backtrack(size_t mark);
  void RaiseWeight(int64_t section, double share = 1.0);

  uint64_t BufferSetKey(const Ids& ids) const;
  bool IsKnownFailure(uint64_t key, const Ids& ids) const;
  void StoreFailure(uint64_t key, const Ids& ids);
  bool SpendNode();

  const Problem& problem_;
  const std::vector<Problem::Buffer>& buffers_;
  const int64_t capacity_;
  std::vector<int64_t> offset_, postponed_at_;
  std::vector<TrailEntry> trail_;
  std::vector<int> rank_;

  std::vector<int64_t> floor_, remaining_;  // by section: lowest bound, remaining bytes
  std::vector<int64_t> candidates_;         // by section: how many buffers can be its lowest
  std::vector<int> lowest_;
  std::vector<double> weight_;  // by section: how often it failed; recent failures count more
  double weight_step_ = 1;
  bool lowest_first_ = false;
  int64_t softness_ = 0;  // added to the slack of every section when sections are compared

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
