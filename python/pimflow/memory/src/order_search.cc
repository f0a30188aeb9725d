#include "order_search.h"

#include <algorithm>
#include <limits>
#include <numeric>

namespace pimflow {
namespace memory {
namespace {

constexpr int64_t kPollStates = 16;
// A layer is narrowed to the width when it has this many times as many sets.
constexpr size_t kMaxOverflow = 4;
constexpr size_t kHistoryEntries = size_t{1} << 25;  // of 8 bytes

}  // namespace

int64_t StepGraph::BytesAtStart() const {
  int64_t bytes = 0;
  for (const Storage& storage : storages) bytes += storage.at_start ? storage.bytes : 0;
  return bytes;
}

StepGraph StepGraph::Reversed() const {
  StepGraph reversed = *this;
  const int last = steps() - 1;
  auto reverse_lists = [last](std::vector<std::vector<int>>* lists, const std::vector<std::vector<int>>& from) {
    *lists = {from.rbegin(), from.rend()};
    for (std::vector<int>& list : *lists) {
      for (int& step : list) step = last - step;
    }
  };
  reverse_lists(&reversed.before, after);
  reverse_lists(&reversed.after, before);
  reversed.touched = {touched.rbegin(), touched.rend()};
  for (Storage& storage : reversed.storages) {
    std::swap(storage.at_start, storage.at_end);
    for (int& step : storage.steps) step = last - step;
  }
  return reversed;
}

std::vector<int64_t> StepGraph::LiveBytes(const std::vector<int>& order) const {
  std::vector<int64_t> change(order.size() + 1, 0);
  std::vector<int> position(order.size());
  for (size_t i = 0; i < order.size(); ++i) position[order[i]] = static_cast<int>(i);
  for (const Storage& storage : storages) {
    int first = storage.at_start ? 0 : steps(), last = storage.at_end ? steps() : 0;
    for (int step : storage.steps) {
      first = std::min(first, position[step]);
      last = std::max(last, position[step] + 1);
    }
    if (first >= last) continue;
    change[first] += storage.bytes;
    change[last] -= storage.bytes;
  }
  std::partial_sum(change.begin(), change.end(), change.begin());
  change.pop_back();
  return change;
}

OrderSearch::OrderSearch(const StepGraph& graph, int64_t limit_bytes, size_t width)
    : graph_(graph),
      limit_(limit_bytes),
      width_(width),
      words_((graph.before.size() + 63) / 64),
      zobrist_(graph.before.size()),
      next_bytes_(std::numeric_limits<int64_t>::max()) {
  std::mt19937_64 random(1);
  for (uint64_t& bits : zobrist_) bits = random();
  descendants_.assign(graph.before.size(), Words(words_, 0));
  for (int step = graph.steps() - 1; step >= 0; --step) {
    for (int next : graph.after[step]) {
      descendants_[step][next >> 6] |= uint64_t{1} << (next & 63);
      for (size_t word = 0; word < words_; ++word) descendants_[step][word] |= descendants_[next][word];
    }
  }
}

OrderOutcome OrderSearch::Run(Clock::time_point deadline, const std::function<void()>& poll) {
  current_.bits.assign(2 * words_, 0);
  for (int step = 0; step < graph_.steps(); ++step) {
    if (graph_.before[step].empty()) Flip(current_.bits.data() + words_, step);
  }
  current_.state = {graph_.BytesAtStart(), 0, 0, -1};
  base_ = current_;
  RunFreeSteps();
  int64_t expanded = 0;
  StoreSet();
  while (!layers_.empty() && complete_index_ < 0) {
    const auto first_layer = layers_.begin();
    Layer layer = std::move(first_layer->second);
    const int steps = first_layer->first;
    layers_.erase(first_layer);
    if (layer.states.size() > width_) DropSets(&layer);
    const auto min_state = std::min_element(layer.states.begin(), layer.states.end(),
                                            [](const State& a, const State& b) { return a.bytes < b.bytes; });
    if (min_state->bytes <= base_.state.bytes && steps > base_.state.steps) {
      Rebase(layer, min_state - layer.states.begin());
      continue;
    }
    for (size_t i = 0; i < layer.states.size() && complete_index_ < 0; ++i) {
      Expand(layer, i);
      if (++expanded % kPollStates == 0) {
        poll();
        if (Clock::now() >= deadline || history_.size() > kHistoryEntries) return OrderOutcome::kStopped;
      }
    }
  }
  if (complete_index_ >= 0) {
    order_ = Trace(complete_index_);
    return OrderOutcome::kFeasible;
  }
  return has_dropped_sets_ ? OrderOutcome::kStopped : OrderOutcome::kInfeasible;
}

/*!
 * \brief Drop all sets but one: a set of `layer`, or a set between the base and it that has fewer bytes.
 */
void OrderSearch::Rebase(const Layer& layer, size_t index) {
  const State& to = layer.states[index];
  const uint64_t* bits = layer.bits.data() + 2 * words_ * index;
  std::vector<Side> sides(graph_.before.size(), Side::kOut);
  for (int step = 0; step < graph_.steps(); ++step) {
    if (Contains(bits, step)) sides[step] = Contains(base_.bits.data(), step) ? Side::kIn : Side::kFree;
  }
  // A narrowed search proves nothing, so that the check by a minimum cut is not needed.
  if (has_dropped_sets_ || MinLiveBytes(graph_, -1, &sides) == to.bytes) sides.assign(sides.size(), Side::kIn);
  const std::vector<int> path = Trace(to.history_index);
  current_ = base_;
  for (int step : path) {
    if (sides[step] != Side::kIn || Contains(current_.bits.data(), step)) continue;
    Execute(step, ExecutionChange(current_.bits.data(), current_.state.bytes, step).after);
  }
  layers_.clear();
  StoreSet();
  base_ = current_;
}

OrderSearch::LiveChange OrderSearch::ExecutionChange(const uint64_t* done, int64_t bytes, int step) const {
  int64_t begun_bytes = 0, finished_bytes = 0;
  for (int s : graph_.touched[step]) {
    const StepGraph::Storage& storage = graph_.storages[s];
    bool begins = !storage.at_start, finishes = !storage.at_end;
    for (int other_step : storage.steps) {
      if (other_step == step) continue;
      (Contains(done, other_step) ? begins : finishes) = false;
      if (!begins && !finishes) break;
    }
    begun_bytes += begins ? storage.bytes : 0;
    finished_bytes += finishes ? storage.bytes : 0;
  }
  return {bytes + begun_bytes, bytes + begun_bytes - finished_bytes};
}

void OrderSearch::Execute(int step, int64_t bytes_after) {
  uint64_t* done = current_.bits.data();
  uint64_t* ready = done + words_;
  Flip(done, step);
  Flip(ready, step);
  current_.state.bytes = bytes_after;
  current_.state.key ^= zobrist_[step];
  ++current_.state.steps;
  current_.moves.push_back(step);
  for (int next : graph_.after[step]) {
    const std::vector<int>& dependencies = graph_.before[next];
    if (std::all_of(dependencies.begin(), dependencies.end(),
                    [&](int dependency) { return Contains(done, dependency); }))
      Flip(ready, next);
  }
}

void OrderSearch::RunFreeSteps() {
  for (bool changed = true; changed;) {
    changed = false;
    for (size_t word = 0; word < words_; ++word) {
      for (uint64_t ready_steps = current_.bits[words_ + word]; ready_steps; ready_steps &= ready_steps - 1) {
        const int step = static_cast<int>(64 * word) + __builtin_ctzll(ready_steps);
        const LiveChange change = ExecutionChange(current_.bits.data(), current_.state.bytes, step);
        if (change.after > current_.state.bytes || change.during > limit_) continue;
        Execute(step, change.after);
        changed = true;
      }
    }
  }
}

void OrderSearch::Expand(const Layer& layer, size_t index) {
  const State& from = layer.states[index];
  const uint64_t* bits = layer.bits.data() + 2 * words_ * index;
  size_t children = 0;
  for (size_t word = 0; word < words_; ++word) {
    for (uint64_t ready_steps = bits[words_ + word]; ready_steps; ready_steps &= ready_steps - 1) {
      const int step = static_cast<int>(64 * word) + __builtin_ctzll(ready_steps);
      const LiveChange change = ExecutionChange(bits, from.bytes, step);
      if (change.during > limit_) {
        next_bytes_ = std::min(next_bytes_, change.during);
        continue;
      }
      current_.bits.assign(bits, bits + 2 * words_);
      current_.state = from;
      current_.moves.clear();
      Execute(step, change.after);
      RunFreeSteps();
      if (DominatesSiblings(from)) {
        StoreSet();
        return;
      }
      if (children == children_.size()) children_.emplace_back();
      std::swap(children_[children++], current_);
    }
  }
  for (size_t i = 0; i < children && complete_index_ < 0; ++i) {
    std::swap(children_[i], current_);
    StoreSet();
  }
}

bool OrderSearch::DominatesSiblings(const State& from) const {
  if (current_.state.bytes > from.bytes) return false;
  const uint64_t* descendants = descendants_[current_.moves.front()].data();
  return std::all_of(current_.moves.begin() + 1, current_.moves.end(),
                     [&](int step) { return Contains(descendants, step); });
}

/*! \brief Put `current_` into its layer, unless the layer already has it. */
void OrderSearch::StoreSet() {
  Layer& layer = layers_[current_.state.steps];
  const auto [entry, is_new] = layer.by_key.emplace(current_.state.key, static_cast<int>(layer.states.size()));
  const auto done = current_.bits.begin();
  if (!is_new && std::equal(done, done + words_, layer.bits.begin() + 2 * words_ * entry->second)) return;
  ++sets_;
  for (int step : current_.moves) {
    history_.emplace_back(current_.state.history_index, step);
    current_.state.history_index = static_cast<int>(history_.size()) - 1;
  }
  current_.moves.clear();
  layer.states.push_back(current_.state);
  layer.bits.insert(layer.bits.end(), current_.bits.begin(), current_.bits.end());
  if (current_.state.steps == graph_.steps()) complete_index_ = current_.state.history_index;
  if (layer.states.size() / kMaxOverflow >= width_) DropSets(&layer);
}

/*! \brief Keep only the `width_` sets with the fewest bytes. */
void OrderSearch::DropSets(Layer* layer) {
  has_dropped_sets_ = true;
  std::vector<int> indices(layer->states.size());
  std::iota(indices.begin(), indices.end(), 0);
  const size_t kept_count = std::min(width_, indices.size());
  std::nth_element(indices.begin(), indices.begin() + kept_count, indices.end(), [&](int a, int b) {
    const int64_t a_bytes = layer->states[a].bytes, b_bytes = layer->states[b].bytes;
    return a_bytes != b_bytes ? a_bytes < b_bytes : a < b;
  });
  indices.resize(kept_count);
  std::sort(indices.begin(), indices.end());
  Layer narrow;
  for (int index : indices) {
    narrow.by_key.emplace(layer->states[index].key, static_cast<int>(narrow.states.size()));
    narrow.states.push_back(layer->states[index]);
    const auto bits = layer->bits.begin() + 2 * words_ * index;
    narrow.bits.insert(narrow.bits.end(), bits, bits + 2 * words_);
  }
  *layer = std::move(narrow);
}

std::vector<int> OrderSearch::Trace(int history_index) const {
  std::vector<int> order;
  for (; history_index >= 0; history_index = history_[history_index].first)
    order.push_back(history_[history_index].second);
  std::reverse(order.begin(), order.end());
  return order;
}

}  // namespace memory
}  // namespace pimflow
