/*!
 * \file order_bound.cc
 * \brief A minimum cut finds the fewest bytes that can be live while a step runs.
 */
#include <algorithm>
#include <numeric>
#include <vector>

#include "order_search.h"

namespace pimflow {
namespace memory {
namespace {

// An infinite capacity: all storages together stay below 2^61 bytes.
constexpr int64_t kInfiniteCapacity = int64_t{1} << 62;

/*! \brief Maximum flow, by Dinitz' algorithm. */
class Network {
 public:
  explicit Network(size_t nodes) : out_(nodes), level_(nodes), next_(nodes) {}

  void Connect(int from, int to, int64_t capacity) {
    out_[from].push_back(static_cast<int>(edges_.size()));
    edges_.push_back({to, capacity});
    out_[to].push_back(static_cast<int>(edges_.size()));
    edges_.push_back({from, 0});
  }

  int64_t MaximumFlow(int source, int sink) {
    int64_t flow = 0;
    while (ComputeLevels(source, sink)) {
      std::fill(next_.begin(), next_.end(), 0);
      while (const int64_t pushed = Push(source, sink)) flow += pushed;
    }
    return flow;
  }

  /*! \brief After `MaximumFlow`: whether a node is on the source's side of the first minimum cut. */
  bool IsOnSourceSide(int node) const { return level_[node] >= 0; }

 private:
  struct Edge {
    int to;
    int64_t residual;
  };

  bool ComputeLevels(int source, int sink) {
    std::fill(level_.begin(), level_.end(), -1);
    std::vector<int> queue{source};
    level_[source] = 0;
    for (size_t i = 0; i < queue.size(); ++i) {
      for (int e : out_[queue[i]]) {
        const int to = edges_[e].to;
        if (edges_[e].residual == 0 || level_[to] >= 0) continue;
        level_[to] = level_[queue[i]] + 1;
        queue.push_back(to);
      }
    }
    return level_[sink] >= 0;
  }

  /*! \brief Push along one shortest path, without recursion: a network may be thousands of steps deep. */
  int64_t Push(int source, int sink) {
    std::vector<int> path;
    int node = source;
    while (node != sink) {
      size_t& i = next_[node];
      while (i < out_[node].size()) {
        const Edge& edge = edges_[out_[node][i]];
        if (edge.residual > 0 && level_[edge.to] == level_[node] + 1) break;
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
    int64_t pushed = kInfiniteCapacity;
    for (int e : path) pushed = std::min(pushed, edges_[e].residual);
    for (int e : path) {
      edges_[e].residual -= pushed;
      edges_[e ^ 1].residual += pushed;
    }
    return pushed;
  }

  std::vector<Edge> edges_;
  std::vector<std::vector<int>> out_;
  std::vector<int> level_;
  std::vector<size_t> next_;
};

std::vector<bool> ReachableSteps(const std::vector<std::vector<int>>& next, int step) {
  std::vector<bool> is_reachable(next.size(), false);
  std::vector<int> queue(next[step]);
  for (size_t i = 0; i < queue.size(); ++i) {
    if (is_reachable[queue[i]]) continue;
    is_reachable[queue[i]] = true;
    queue.insert(queue.end(), next[queue[i]].begin(), next[queue[i]].end());
  }
  return is_reachable;
}

}  // namespace

// The steps in the set are the nodes on the source's side. A storage is two nodes, joined by an edge of its
// bytes: the first is on the source's side if the storage has begun, the second on the sink's if it has not
// finished.
int64_t MinLiveBytes(const StepGraph& graph, int running, std::vector<Side>* sides) {
  std::vector<int> node(sides->size(), -1), free;
  for (int step = 0; step < graph.steps(); ++step) {
    if ((*sides)[step] != Side::kFree) continue;
    node[step] = static_cast<int>(free.size());
    free.push_back(step);
  }
  const int source = static_cast<int>(free.size()), sink = source + 1;
  Network network(free.size() + 2 + 2 * graph.storages.size());
  for (int step : free) {
    for (int dependency : graph.before[step]) {
      if ((*sides)[dependency] == Side::kOut) network.Connect(node[step], sink, kInfiniteCapacity);
      if ((*sides)[dependency] == Side::kFree) network.Connect(node[step], node[dependency], kInfiniteCapacity);
    }
  }
  int64_t bytes = 0;
  int begun_node = sink + 1;
  for (const StepGraph::Storage& storage : graph.storages) {
    bool is_begun = storage.at_start, is_unfinished = storage.at_end, is_open = false;
    for (int step : storage.steps) {
      is_begun = is_begun || step == running || (*sides)[step] == Side::kIn;
      is_unfinished = is_unfinished || (*sides)[step] == Side::kOut;
      is_open = is_open || (*sides)[step] == Side::kFree;
    }
    if (is_begun && is_unfinished) bytes += storage.bytes;
    if ((is_begun && is_unfinished) || !is_open) continue;
    const int unfinished_node = begun_node + 1;
    network.Connect(begun_node, unfinished_node, storage.bytes);
    if (is_begun) network.Connect(source, begun_node, kInfiniteCapacity);
    if (is_unfinished) network.Connect(unfinished_node, sink, kInfiniteCapacity);
    for (int step : storage.steps) {
      if (node[step] < 0) continue;
      network.Connect(node[step], begun_node, kInfiniteCapacity);
      network.Connect(unfinished_node, node[step], kInfiniteCapacity);
    }
    begun_node += 2;
  }
  bytes += network.MaximumFlow(source, sink);
  for (int step : free) (*sides)[step] = network.IsOnSourceSide(node[step]) ? Side::kIn : Side::kOut;
  return bytes;
}

int64_t LowerBound(const StepGraph& graph, Clock::time_point deadline, const std::function<void()>& poll) {
  std::vector<int> order(graph.before.size());
  std::iota(order.begin(), order.end(), 0);
  const std::vector<int64_t> live_bytes = graph.LiveBytes(order);
  std::stable_sort(order.begin(), order.end(), [&](int a, int b) { return live_bytes[a] > live_bytes[b]; });
  int64_t bound = 0;
  for (int step : order) {
    poll();
    if (live_bytes[step] <= bound || Clock::now() >= deadline) break;
    const std::vector<bool> is_dependency = ReachableSteps(graph.before, step),
                            is_dependent = ReachableSteps(graph.after, step);
    std::vector<Side> sides(order.size(), Side::kFree);
    for (size_t other_step = 0; other_step < sides.size(); ++other_step) {
      if (is_dependency[other_step]) sides[other_step] = Side::kIn;
      if (is_dependent[other_step]) sides[other_step] = Side::kOut;
    }
    sides[step] = Side::kOut;
    bound = std::max(bound, MinLiveBytes(graph, step, &sides));
  }
  return bound;
}

}  // namespace memory
}  // namespace pimflow
