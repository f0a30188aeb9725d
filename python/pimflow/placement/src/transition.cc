/*!
 * \file transition.cc
 * \brief The transition of a state by a group: which results are live after it, and the bytes that lie meanwhile.
 */
#include <algorithm>
#include <map>
#include <utility>
#include <vector>

#include "label_search.h"

namespace pimflow {
namespace placement {
namespace {

/*! \brief How `group` reads a result; null if it does not. */
const Access* FindAccess(const LiveResult& result, const Group& group) {
  if (result.position != group.begin || result.by_group.empty()) return nullptr;
  const Access& access = result.by_group[group.number];
  return access.reads ? &access : nullptr;
}

}  // namespace

/*! \brief Collects the transition of one state by one group. */
class LabelSearch::TransitionBuilder {
 public:
  TransitionBuilder(LabelSearch& search, const Group& group, GroupTransition& transition)
      : search_(search),
        regions_(search.problem_.regions),
        group_(group),
        transition_(transition),
        slots_(search.next_slots_) {
    slots_.clear();
    transition.Clear();
    transition.transform_ns = group.reading->input_cost.ns, transition.transform_pj = group.reading->input_cost.pj;
    transition.is_late = group.reading->has_late_operands;
    const std::vector<int>& readers = regions_[group.end - 1].readers;
    if (!readers.empty()) first_reader_ = readers.front();
  }

  /*! \brief Add the result of a slot of the state. */
  void AddSlot(int slot, ResultId id) {
    const LiveResult& result = search_.live_[id];
    const Access* access = FindAccess(result, group_);
    if (access) {
      transition_.transform_ns += access->ns, transition_.transform_pj += access->pj;
      transition_.operand_slots.emplace_back(slot, access->is_late);
    }
    const bool fuses_deferred = access && result.deferral && access->deferred >= 0;
    if (search_.pools_) AddSlotBytes(slot, result, access, fuses_deferred);
    if (fuses_deferred) {
      transition_.deferred |= 1u << access->deferred;
      if (access->is_late) transition_.is_late = false;
    }
    AddLive(access && access->is_result ? result.next_if_fused : id, slot);
  }

  /*! \brief Add the result of a region of the group. */
  void AddResult(int n) {
    const bool is_last = n + 1 == group_.end;
    const Region& region = regions_[n];
    const int layout = is_last ? group_.layout : 0;
    const bool is_internal = group_.fuses_regions && !is_last && region.live_end <= group_.end;
    if (search_.pools_ && region.live_end > n && region.layouts[layout].bytes > 0 && !is_internal) {
      const int set = search_.query_.only_gpu ? 0 : region.layouts[layout].set;
      AddBytes(set, region.alias, region.layouts[layout].bytes, false, region.live_end > group_.end);
    }
    AddLive(search_.live_.FindResult(n, layout, is_last ? search_.NextDeferral(group_) : kDone), -1);
  }

  /*! \brief Add what the deferred epilogue adds of the group's own results. */
  void AddInnerAddends() {
    for (int n : group_.reading->inner_addends) {
      if (!search_.pools_ || !IsShorterLived(regions_[n].live_end)) continue;
      AddAddend(n, search_.query_.only_gpu ? 0 : regions_[n].layouts[0].set, -1);
    }
  }

  /*! \brief Make the key; `flags` are those before the group. */
  void Finish(uint32_t flags) {
    if (search_.pools_) LayResultOverOperand();
    for (const auto& [place, entry] : alias_classes_) {
      LiveBytes(entry.is_live_before, entry.is_live_after)[place.first] += entry.bytes;
    }
    if (search_.pools_) {
      for (const InputCopy& copy : group_.reading->input_copies) {
        transition_.copies.emplace_back(copy.order, 0, copy.bytes, false);
      }
      std::sort(transition_.copies.begin(), transition_.copies.end());
    }
    std::sort(slots_.begin(), slots_.end());
    flags = search_.NextFlags(group_, flags);
    transition_.key.push_back(group_.end < search_.positions_ ? flags : flags & kUsedPlainMemory);
    for (const auto& [id, source] : slots_) transition_.key.push_back(id), transition_.source_slots.push_back(source);
  }

 private:
  /*! \brief The bytes of an alias class, which are stored once. */
  struct AliasClass { double bytes = 0; bool is_live_before = false, is_live_after = false; };

  PoolBytes& LiveBytes(bool is_live_before, bool is_live_after) {
    if (!is_live_before) return transition_.output_bytes;
    return is_live_after ? transition_.resident_bytes : transition_.input_bytes;
  }

  void AddBytes(int set, int alias, double bytes, bool is_live_before, bool is_live_after) {
    if (alias < 0) {
      LiveBytes(is_live_before, is_live_after)[set] += bytes;
      return;
    }
    AliasClass& entry = alias_classes_[{set, alias}];
    entry.bytes = std::max(entry.bytes, bytes);
    entry.is_live_before |= is_live_before, entry.is_live_after |= is_live_after;
  }

  void AddSlotBytes(int slot, const LiveResult& result, const Access* access, bool fuses_deferred) {
    const bool is_dead = result.live_end <= group_.begin;
    if (result.is_addend ? is_dead : !is_dead && result.bytes > 0) {
      AddBytes(result.set, result.alias, result.bytes, true, is_dead || result.live_end > group_.end);
    }
    if (result.deferral) {
      const Region& region = regions_[result.region];
      double& resident_bytes = transition_.resident_bytes[result.set];
      if (fuses_deferred && group_.fuses_epilogue && region.is_shared) resident_bytes += region.tensor_bytes;
      if (result.deferral == kPartialSum) resident_bytes += region.tensor_bytes;
    }
    if (access && access->is_copied) {
      const Operand& operand = group_.reading->operands[access->operand];
      const double bytes = regions_[operand.region].tensor_bytes;
      transition_.copies.emplace_back(operand.order, result.set, bytes, operand.copy_outlives_source);
    }
    if (result.is_addend) addends_.push_back(result.alias);
    if (access && !access->is_copied && !result.deferral && result.set == ResultSet()) {
      const Operand& operand = group_.reading->operands[access->operand];
      if (operand.is_overwritable) overwritable_.push_back(search_.live_.AddendAlias(static_cast<int>(operand.region)));
    }
    if (group_.defers_epilogue && access && access->addend >= 0 && IsShorterLived(result.live_end)) {
      AddAddend(access->addend, result.set, slot);
    }
  }

  int ResultSet() const {
    return search_.query_.only_gpu ? 0 : static_cast<int>(regions_[group_.end - 1].layouts[group_.layout].set);
  }

  /*! \brief Store the result over an operand that nothing needs any more, if there is one. */
  void LayResultOverOperand() {
    const auto is_dead = [&](int alias) { return std::find(addends_.begin(), addends_.end(), alias) == addends_.end(); };
    if (std::none_of(overwritable_.begin(), overwritable_.end(), is_dead)) return;
    transition_.output_bytes[ResultSet()] -= regions_[group_.end - 1].layouts[group_.layout].bytes;
  }

  /*! \brief Whether an addend that lives so long is dead before the deferred epilogue adds it. */
  bool IsShorterLived(int live_end) const { return first_reader_ >= 0 && live_end <= first_reader_; }

  void AddAddend(int region, int set, int slot) {
    slots_.emplace_back(search_.live_.InternAddend(region, set, first_reader_), slot);
  }

  void AddLive(ResultId id, int slot) {
    id = search_.live_.AdvanceResult(id, group_.end);
    if (id) slots_.emplace_back(id, slot);
  }

  LabelSearch& search_;
  const std::vector<Region>& regions_;
  const Group& group_;
  GroupTransition& transition_;
  int first_reader_ = -1;  // of the group's result, which does its deferred epilogue; -1: none
  std::vector<std::pair<ResultId, int>>& slots_;  // live results, each with its slot of the state; -1: of the group
  std::map<std::pair<int, int>, AliasClass> alias_classes_;  // by set and alias
  std::vector<int> addends_, overwritable_;  // aliases of addends in the state, and of what the result may lie over
};

/*! \brief Whether at each position some group can read all live results as they lie: such as all parts of one view. */
bool LabelSearch::CanBeRead(const Key& key) {
  auto& reads = restricted_reads_;
  reads.clear();
  for (size_t i = 1; i < key.size(); ++i) {
    if (i > 1 && key[i] == key[i - 1]) continue;
    for (ResultId id = key[i]; id; id = live_[id].next) {
      if (live_[id].restricts) reads.emplace_back(live_[id].position, id);
    }
  }
  std::sort(reads.begin(), reads.end());
  for (auto begin = reads.begin(), end = begin; begin != reads.end(); begin = end) {
    const int position = begin->first;
    while (end != reads.end() && end->first == position) ++end;
    const auto can_read = [&](const Group& group) {
      return std::none_of(begin, end, [&](const auto& read) {
        const Access& access = live_[read.second].by_group[group.number];
        return access.reads && !access.is_possible;
      });
    };
    const auto& groups = problem_.groups[position];
    if (!is_straddled_[position] && std::none_of(groups.begin(), groups.end(), can_read)) return false;
  }
  return true;
}

bool LabelSearch::MakeTransition(const Bucket& bucket, const Group& group, GroupTransition& transition) {
  for (int i = 0; i < bucket.slots; ++i) {
    const Access* access = FindAccess(live_[bucket.key[1 + i]], group);
    if (access && !access->is_possible) return false;
  }
  TransitionBuilder builder(*this, group, transition);
  for (int i = 0; i < bucket.slots; ++i) builder.AddSlot(i, bucket.key[1 + i]);
  for (int n = group.begin; n < group.end; ++n) builder.AddResult(n);
  builder.AddInnerAddends();
  builder.Finish(bucket.key[0]);
  return bucket_index_[group.end].count(transition.key) || CanBeRead(transition.key);
}

}  // namespace placement
}  // namespace pimflow
