/*!
 * \file live_results.cc
 * \brief Results interned by how their readers use them.
 */
#include "live_results.h"

#include <algorithm>

namespace pimflow {
namespace placement {
namespace {

constexpr int kAfterAll = 1 << 30;

}  // namespace

LiveResults::LiveResults(const Problem& problem, bool counts_time, bool counts_memory, bool one_pool)
    : problem_(problem),
      all_{{kAfterAll, 0, 0, kDone, -1, {}}},
      shapes_{{kAfterAll, 0, {}}},
      result_ids_(problem.positions) {
  // By region, where groups begin that read it, each with the operand.
  std::vector<std::map<int, std::vector<std::pair<const Group*, const Operand*>>>> reads(problem.positions);
  for (const auto& groups : problem.groups) {
    for (const Group& group : groups) {
      for (const Operand& operand : group.reading->operands) {
        reads[operand.region][group.begin].emplace_back(&group, &operand);
      }
    }
  }
  for (int n = 0; n < problem.positions; ++n) {
    const Region& region = problem.regions[n];
    const int layouts = static_cast<int>(region.layouts.size());
    result_ids_[n].assign(layouts, std::vector<ResultId>(kDeferrals, 0));
    for (int layout = 0; layout < layouts; ++layout) {
      std::vector<ResultId>& ids = result_ids_[n][layout];
      if (counts_memory && region.live_end > n && region.layouts[layout].bytes > 0) {
        LiveResult stored_result{static_cast<int>(region.live_end) - 1, 0, 0, kDone, -1, {}};
        stored_result.live_end = region.live_end;
        stored_result.alias = region.alias;
        stored_result.set = one_pool ? 0 : region.layouts[layout].set;
        stored_result.bytes = region.layouts[layout].bytes;
        ids.assign(kDeferrals, Intern(std::move(stored_result)));
      }
      // From the last reader back to the first, which does the deferred epilogue.
      for (auto reading = reads[n].rbegin(); reading != reads[n].rend(); ++reading) {
        std::vector<Access> by_group(problem.groups[reading->first].size());
        for (const auto& [group, operand] : reading->second) {
          Access& access = by_group[group->number] = operand->by_layout[layout];
          if (!counts_time) access.is_late = false, access.ns = access.pj = 0;
        }
        const ResultId fused_id = ids[kDone];
        if (region.can_defer) {
          for (int deferral : {kEpilogue, kPartialSum}) {
            ids[deferral] = Intern({reading->first, ids[deferral], fused_id, deferral, n, by_group});
          }
        }
        for (Access& access : by_group) access.deferred = -1, access.is_result = true;  // nothing is deferred
        ids[kDone] = Intern({reading->first, fused_id, fused_id, kDone, -1, std::move(by_group)});
      }
    }
  }
}

ResultId LiveResults::Intern(LiveResult result) {
  ReadShape shape{result.position, all_[result.next].shape, {}};
  for (size_t g = 0; g < result.by_group.size(); ++g) {
    const Access& access = result.by_group[g];
    if (access.reads) shape.groups.emplace_back(static_cast<int>(g), access.is_late);
    shape.is_late |= access.reads && access.is_late;
    result.restricts |= access.reads && !access.is_possible;
  }
  if (shape.groups.empty()) {
    result.shape = shape.next;
  } else {
    const auto [entry, is_new] =
        shape_ids_.emplace(std::make_tuple(shape.position, shape.next, shape.groups), shapes());
    if (is_new) shapes_.push_back(shape);
    result.shape = entry->second;
  }
  if (result.next) {
    const LiveResult& next = all_[result.next];
    result.live_end = next.live_end, result.alias = next.alias, result.set = next.set, result.bytes = next.bytes;
  }
  std::string key;
  const auto add = [&](double value) { key.append(reinterpret_cast<const char*>(&value), sizeof value); };
  for (double value : {double(result.position), double(result.next), double(result.next_if_fused),
                       double(result.deferral), double(result.region), double(result.live_end), double(result.alias),
                       double(result.set), double(result.is_addend), result.bytes}) {
    add(value);
  }
  for (size_t g = 0; g < result.by_group.size(); ++g) {
    const Access& a = result.by_group[g];
    if (!a.reads) continue;
    for (double value : {double(g), double(a.is_late), double(a.is_result), double(a.is_possible), double(a.is_copied),
                         double(a.operand), double(a.deferred), double(a.addend), a.ns, a.pj}) {
      add(value);
    }
  }
  const auto [entry, is_new] = ids_.emplace(std::move(key), static_cast<ResultId>(all_.size()));
  if (is_new) all_.push_back(std::move(result));
  return entry->second;
}

ResultId LiveResults::InternAddend(int region, int set, int position) {
  LiveResult addend{position, 0, 0, kDone, -1, {}};
  addend.is_addend = true;
  addend.live_end = problem_.regions[region].live_end;
  addend.alias = AddendAlias(region);  // stored once, although several deferred epilogues may add it
  addend.set = set;
  addend.bytes = problem_.regions[region].tensor_bytes;
  return Intern(std::move(addend));
}

}  // namespace placement
}  // namespace pimflow
