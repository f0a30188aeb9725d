/*!
 * \file order_bound.cc
 * \brief A minimum cut says how few bytes can be live while a step runs.
 */
#include <algorithm>
#include <numeric>
#include <vector>

#include "order_search.h"

namespace pimflow {
namespace memory {
namespace {

// More than all storages together, which stay below 2^61 bytes.
constexpr int64_t kFar = int64_t{1} << 62;

/*! \brief Maximum flow, as Dinitz finds it. */
class Network {
 public:
  explicit Network(int nodes) : out_(nodes), level_(nodes), next_(nodes) {}

  void Connect(int from, int to, int64_t capacity) {
    out_[from].push_back(static_cast<int>(edges_.size()));
    edges_.push_back({to, capacity});
    out_[to].push_back(static_cast<int>(edges_.size()));
    edges_.push_back({from, 0});
  }

  int64_t MaximumFlow(int source, int sink) {
    int64_t flow = 0;
    while (Levels(source, sink)) {
      std::fill(next_.begin(), next_.end(), 0);
      while (const int64_t pushed = Push(source, sink)) flow += pushed;
    }
    return flow;
  }

 private:
  struct Edge {
    int to;
    int64_t left;
  };

  bool Levels(int source, int sink) {
    std::fill(level_.begin(), level_.end(), -1);
    std::vector<int> queue{source};
    level_[source] = 0;
    for (size_t i = 0; i < queue.size(); ++i) {
      for (int e : out_[queue[i]]) {
        const int to = edges_[e].to;
        if (edges_[e].left == 0 || level_[to] >= 0) continue;
        level_[to] = level_[queue[i]] + 1;
        queue.push_back(to);
      }
    }
    return level_[sink] >= 0;
  }

  /*! \brief Push along one shortest path; a path as a list, since networks may be thousands of steps deep. */
  int64_t Push(int source, int sink) {
    std::vector<int> path;
    int node = source;
    while (node != sink) {
      size_t& i = next_[node];
      while (i < out_[node].size()) {
        const Edge& edge = edges_[out_[node][i]];
        if (edge.left > 0 && level_[edge.to] == level_[node] + 1) break;
        ++i;
      }
      if (i < out_[node].size()) {
        path.push_back(out_[node][i]);
        node = edges_[path.back()].to;
      } else if (path.empty()) {
        return 0;
      } else {
        node = edges_[path.back() ^ 1].to;
        path.pop_back();
        ++next_[node];
      }
    }
    int64_t pushed = kFar;
    for (int e : path) pushed = std::min(pushed, edges_[e].left);
    for (int e : path) {
      edges_[e].left -= pushed;
      edges_[e ^ 1].left += pushed;
    }
    return pushed;
  }

  std::vector<Edge> edges_;
  std::vector<std::vector<int>> out_;
  std::vector<int> level_;
  std::vector<size_t> next_;
};

std::vector<bool> Reached(const std::vector<std::vector<int>>& next, int step) {
  std::vector<bool> reached(next.size(), false);
  std::vector<int> queue(next[step]);
  for (size_t i = 0; i < queue.size(); ++i) {
    if (reached[queue[i]]) continue;
    reached[queue[i]] = true;
    queue.insert(queue.end(), next[queue[i]].begin(), next[queue[i]].end());
  }
  return reached;
}

/*!
 * \brief The fewest bytes that can be live while `step` runs.
 *
 * Nodes on the source's side are the steps executed before. A storage is two nodes with an edge of its bytes:
 * the first is on the source's side if it has begun, the second on the sink's if it has not finished.
 */
int64_t FewestBytes(const StepGraph& graph, int step) {
  const int steps = graph.steps(), storages = static_cast<int>(graph.storages.size());
  const int source = steps + 2 * storages, sink = source + 1;
  Network network(sink + 1);
  const std::vector<bool> first = Reached(graph.before, step), later = Reached(graph.after, step);
  for (int other = 0; other < steps; ++other) {
    if (first[other]) network.Connect(source, other, kFar);
    if (later[other] || other == step) network.Connect(other, sink, kFar);
    for (int need : graph.before[other]) network.Connect(other, need, kFar);
  }
  int64_t bytes = 0;
  for (int s = 0; s < storages; ++s) {
    const StepGraph::Storage& storage = graph.storages[s];
    const bool used = std::find(storage.steps.begin(), storage.steps.end(), step) != storage.steps.end();
    if (used || (storage.at_start && storage.at_end)) {
      bytes += storage.bytes;
      continue;
    }
    const int begun = steps + 2 * s, unfinished = begun + 1;
    network.Connect(begun, unfinished, storage.bytes);
    if (storage.at_start) network.Connect(source, begun, kFar);
    if (storage.at_end) network.Connect(unfinished, sink, kFar);
    for (int other : storage.steps) {
      network.Connect(other, begun, kFar);
      network.Connect(unfinished, other, kFar);
    }
  }
  return bytes + network.MaximumFlow(source, sink);
}

}  // namespace

int64_t LowerBound(const StepGraph& graph, Clock::time_point deadline, const std::function<void()>& poll) {
  std::vector<int> order(graph.before.size());
  std::iota(order.begin(), order.end(), 0);
  const std::vector<int64_t> given = graph.LiveBytes(order);
  std::stable_sort(order.begin(), order.end(), [&](int a, int b) { return given[a] > given[b]; });
  int64_t bound = 0;
  for (int step : order) {
    poll();
    if (given[step] <= bound || Clock::now() >= deadline) break;
    bound = std::max(bound, FewestBytes(graph, step));
  }
  return bound;
}

}  // namespace memory
}  // namespace pimflow
