#include "order_search.h"

#include <algorithm>
#include <limits>
#include <numeric>

namespace pimflow {
namespace memory {
namespace {

constexpr int64_t kPollStates = 16;
// A layer is narrowed to the width when it has this many times as many sets.
constexpr size_t kOverflow = 4;
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
  auto turn = [last](std::vector<std::vector<int>>* lists, const std::vector<std::vector<int>>& from) {
    *lists = {from.rbegin(), from.rend()};
    for (std::vector<int>& list : *lists) {
      for (int& step : list) step = last - step;
    }
  };
  turn(&reversed.before, after);
  turn(&reversed.after, before);
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
  follows_.assign(graph.before.size(), Words(words_, 0));
  for (int step = graph.steps() - 1; step >= 0; --step) {
    for (int next : graph.after[step]) {
      follows_[step][next >> 6] |= uint64_t{1} << (next & 63);
      for (size_t word = 0; word < words_; ++word) follows_[step][word] |= follows_[next][word];
    }
  }
}

OrderOutcome OrderSearch::Run(Clock::time_point deadline, const std::function<void()>& poll) {
  now_.bits.assign(2 * words_, 0);
  for (int step = 0; step < graph_.steps(); ++step) {
    if (graph_.before[step].empty()) Flip(now_.bits.data() + words_, step);
  }
  now_.state = {graph_.BytesAtStart(), 0, 0, -1};
  base_ = now_;
  RunWhatCostsNothing();
  int64_t expanded = 0;
  Keep();
  while (!layers_.empty() && found_ < 0) {
    const auto first = layers_.begin();
    Layer layer = std::move(first->second);
    const int steps = first->first;
    layers_.erase(first);
    if (layer.states.size() > width_) Narrow(&layer);
    const auto least = std::min_element(layer.states.begin(), layer.states.end(),
                                        [](const State& a, const State& b) { return a.bytes < b.bytes; });
    if (least->bytes <= base_.state.bytes && steps > base_.state.steps) {
      Rebase(layer, least - layer.states.begin());
      continue;
    }
    for (size_t i = 0; i < layer.states.size() && found_ < 0; ++i) {
      Expand(layer, i);
      if (++expanded % kPollStates == 0) {
        poll();
        if (Clock::now() >= deadline || history_.size() > kHistoryEntries) return OrderOutcome::kStopped;
      }
    }
  }
  if (found_ >= 0) {
    order_ = Trace(found_);
    return OrderOutcome::kFound;
  }
  return narrowed_ ? OrderOutcome::kStopped : OrderOutcome::kNone;
}

/*!
 * \brief Drop all sets but one: a set of `layer`, or a set between the base and it that has fewer bytes.
 */
void OrderSearch::Rebase(const Layer& layer, size_t index) {
  const State& to = layer.states[index];
  const uint64_t* bits = layer.bits.data() + 2 * words_ * index;
  std::vector<Side> sides(graph_.before.size(), Side::kOut);
  for (int step = 0; step < graph_.steps(); ++step) {
    if (Has(bits, step)) sides[step] = Has(base_.bits.data(), step) ? Side::kIn : Side::kFree;
  }
  // A narrowed search proves nothing, so that the check by a minimum cut is not needed.
  if (narrowed_ || FewestBytes(graph_, -1, &sides) == to.bytes) sides.assign(sides.size(), Side::kIn);
  const std::vector<int> way = Trace(to.came_from);
  now_ = base_;
  for (int step : way) {
    if (sides[step] != Side::kIn || Has(now_.bits.data(), step)) continue;
    Execute(step, Executed(now_.bits.data(), now_.state.bytes, step).after);
  }
  layers_.clear();
  Keep();
  base_ = now_;
}

OrderSearch::Change OrderSearch::Executed(const uint64_t* done, int64_t bytes, int step) const {
  int64_t begun = 0, finished = 0;
  for (int s : graph_.touched[step]) {
    const StepGraph::Storage& storage = graph_.storages[s];
    bool begins = !storage.at_start, finishes = !storage.at_end;
    for (int other : storage.steps) {
      if (other == step) continue;
      (Has(done, other) ? begins : finishes) = false;
      if (!begins && !finishes) break;
    }
    begun += begins ? storage.bytes : 0;
    finished += finishes ? storage.bytes : 0;
  }
  return {bytes + begun, bytes + begun - finished};
}

void OrderSearch::Execute(int step, int64_t bytes_after) {
  uint64_t* done = now_.bits.data();
  uint64_t* ready = done + words_;
  Flip(done, step);
  Flip(ready, step);
  now_.state.bytes = bytes_after;
  now_.state.key ^= zobrist_[step];
  ++now_.state.steps;
  now_.moves.push_back(step);
  for (int next : graph_.after[step]) {
    const std::vector<int>& needs = graph_.before[next];
    if (std::all_of(needs.begin(), needs.end(), [&](int need) { return Has(done, need); })) Flip(ready, next);
  }
}

void OrderSearch::RunWhatCostsNothing() {
  for (bool changed = true; changed;) {
    changed = false;
    for (size_t word = 0; word < words_; ++word) {
      for (uint64_t left = now_.bits[words_ + word]; left; left &= left - 1) {
        const int step = static_cast<int>(64 * word) + __builtin_ctzll(left);
        const Change change = Executed(now_.bits.data(), now_.state.bytes, step);
        if (change.after > now_.state.bytes || change.during > limit_) continue;
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
    for (uint64_t left = bits[words_ + word]; left; left &= left - 1) {
      const int step = static_cast<int>(64 * word) + __builtin_ctzll(left);
      const Change change = Executed(bits, from.bytes, step);
      if (change.during > limit_) {
        next_bytes_ = std::min(next_bytes_, change.during);
        continue;
      }
      now_.bits.assign(bits, bits + 2 * words_);
      now_.state = from;
      now_.moves.clear();
      Execute(step, change.after);
      RunWhatCostsNothing();
      if (OnlyWay(from)) {
        Keep();
        return;
      }
      if (children == children_.size()) children_.emplace_back();
      std::swap(children_[children++], now_);
    }
  }
  for (size_t i = 0; i < children && found_ < 0; ++i) {
    std::swap(children_[i], now_);
    Keep();
  }
}

bool OrderSearch::OnlyWay(const State& from) const {
  if (now_.state.bytes > from.bytes) return false;
  const uint64_t* follow = follows_[now_.moves.front()].data();
  return std::all_of(now_.moves.begin() + 1, now_.moves.end(), [&](int step) { return Has(follow, step); });
}

/*! \brief Put `now_` into its layer, unless the layer already has it. */
void OrderSearch::Keep() {
  Layer& layer = layers_[now_.state.steps];
  const auto [known, is_new] = layer.by_key.emplace(now_.state.key, static_cast<int>(layer.states.size()));
  const auto done = now_.bits.begin();
  if (!is_new && std::equal(done, done + words_, layer.bits.begin() + 2 * words_ * known->second)) return;
  ++sets_;
  for (int step : now_.moves) {
    history_.emplace_back(now_.state.came_from, step);
    now_.state.came_from = static_cast<int>(history_.size()) - 1;
  }
  now_.moves.clear();
  layer.states.push_back(now_.state);
  layer.bits.insert(layer.bits.end(), now_.bits.begin(), now_.bits.end());
  if (now_.state.steps == graph_.steps()) found_ = now_.state.came_from;
  if (layer.states.size() / kOverflow >= width_) Narrow(&layer);
}

/*! \brief Keep only the `width_` sets with the fewest bytes. */
void OrderSearch::Narrow(Layer* layer) {
  narrowed_ = true;
  std::vector<int> chosen(layer->states.size());
  std::iota(chosen.begin(), chosen.end(), 0);
  const size_t kept = std::min(width_, chosen.size());
  std::nth_element(chosen.begin(), chosen.begin() + kept, chosen.end(), [&](int a, int b) {
    const int64_t left = layer->states[a].bytes, right = layer->states[b].bytes;
    return left != right ? left < right : a < b;
  });
  chosen.resize(kept);
  std::sort(chosen.begin(), chosen.end());
  Layer narrow;
  for (int index : chosen) {
    narrow.by_key.emplace(layer->states[index].key, static_cast<int>(narrow.states.size()));
    narrow.states.push_back(layer->states[index]);
    const auto bits = layer->bits.begin() + 2 * words_ * index;
    narrow.bits.insert(narrow.bits.end(), bits, bits + 2 * words_);
  }
  *layer = std::move(narrow);
}

std::vector<int> OrderSearch::Trace(int came_from) const {
  std::vector<int> order;
  for (; came_from >= 0; came_from = history_[came_from].first) order.push_back(history_[came_from].second);
  std::reverse(order.begin(), order.end());
  return order;
}

}  // namespace memory
}  // namespace pimflow
