/*!
 * \file live_results.h
 * \brief Results that are still needed, identified by how later readers use them.
 *
 * Two results that every later reader uses alike, and that lie in memory alike, are one `LiveResult`: states of the
 * search that differ only in these are the same state.
 */
#ifndef PIMFLOW_PLACEMENT_LIVE_RESULTS_H_
#define PIMFLOW_PLACEMENT_LIVE_RESULTS_H_

#include <deque>
#include <map>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "problem.h"

namespace pimflow {
namespace placement {

using ResultId = uint32_t;  // 0: no longer needed

enum Deferral { kDone, kEpilogue, kPartialSum };  // what is deferred
constexpr int kDeferrals = 3;

/*! \brief A result until its next reader, and what it becomes after that. */
struct LiveResult {
  int position;                // of its next reader
  ResultId next, next_if_fused;  // after that reader, if the epilogue stays deferred and if the reader does it
  int deferral;
  int region;                   // where something is deferred, else -1
  std::vector<Access> by_group;  // groups that begin at `position`; empty if it is only stored until then
  int shape = 0;
  bool restricts = false;  // some groups cannot read it
  // If memory counts: the position from which on it is dead, its alias class, its set of channels.
  int live_end = 0, alias = -1, set = 0;
  bool is_addend = false;  // kept for a deferred epilogue once it is dead
  double bytes = 0;
};

/*! \brief The readers of a result in any layout: groups that begin at `position`, and whether they read it late. */
struct ReadShape {
  int position, next;
  std::vector<std::pair<int, bool>> groups;
  bool is_late = false;  // for some of them
};

class LiveResults {
 public:
  LiveResults(const Problem& problem, bool counts_time, bool counts_memory, bool one_pool);

  const LiveResult& operator[](ResultId id) const { return all_[id]; }
  const ReadShape& Shape(int shape) const { return shapes_[shape]; }
  int shapes() const { return static_cast<int>(shapes_.size()); }
  ResultId FindResult(int region, int layout, Deferral deferral) const { return result_ids_[region][layout][deferral]; }
  int ResultShape(int region) const { return all_[result_ids_[region][0][kDone]].shape; }
  /*! \brief The result as it is at `position`. */
  ResultId AdvanceResult(ResultId id, int position) const {
    while (all_[id].position < position) id = all_[id].next;
    return id;
  }
  /*! \brief The alias class of the result of `region` as an addend. */
  int AddendAlias(int region) const { return problem_.positions + region; }
  /*! \brief A tensor that a deferred epilogue still adds, live until `position` is done. */
  ResultId InternAddend(int region, int set, int position);

 private:
  ResultId Intern(LiveResult result);

  const Problem& problem_;
  std::deque<LiveResult> all_;
  std::vector<ReadShape> shapes_;
  std::map<std::string, ResultId> ids_;
  std::map<std::tuple<int, int, std::vector<std::pair<int, bool>>>, int> shape_ids_;
  std::vector<std::vector<std::vector<ResultId>>> result_ids_;  // by region, layout and deferral
};

}  // namespace placement
}  // namespace pimflow
#endif  // PIMFLOW_PLACEMENT_LIVE_RESULTS_H_
