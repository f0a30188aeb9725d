/*! \brief Nodes of command streams (commands and loops), and rolling of repeated commands into loops. */
#ifndef PIMFLOW_PIM_BACKEND_NODES_H_
#define PIMFLOW_PIM_BACKEND_NODES_H_

#include <tvm/ffi/error.h>

#include <array>
#include <iterator>
#include <utility>
#include <vector>

#include "../../simulators/src/words.h"

namespace pimflow::lowering {

/*! \brief An affine function of the counters of the enclosing loops, outermost first. */
struct Affine {
  int64_t base = 0;
  std::array<int64_t, kMaxDepth> coefficients{};

  bool operator==(const Affine& x) const { return base == x.base && coefficients == x.coefficients; }
};

/*!
 * \brief A command or a loop. Its operands are those of program.h, with numbers and affines separate, each in order.
 */
struct Node {
  Opcode opcode;
  std::array<int64_t, 3> numbers{};  // for a loop its extent
  std::array<Affine, 2> affines{};
  std::vector<Node> body;

  bool operator==(const Node& x) const {
    return opcode == x.opcode && numbers == x.numbers && affines == x.affines && body == x.body;
  }
};

using Nodes = std::vector<Node>;

inline void Append(Nodes* nodes, Nodes more) {
  if (nodes->empty()) {
    *nodes = std::move(more);
  } else {
    nodes->insert(nodes->end(), std::make_move_iterator(more.begin()), std::make_move_iterator(more.end()));
  }
}

/*! \brief The body of a loop whose first two iterations are `first` and `second`. */
inline Nodes LoopBody(Nodes first, const Nodes& second) {
  auto require = [](bool same) {
    if (!same) TVM_FFI_THROW(RuntimeError) << "steps that are to repeat differ";
  };
  require(first.size() == second.size());
  for (size_t i = 0; i < first.size(); ++i) {
    Node& node = first[i];
    const Node& next = second[i];
    require(node.opcode == next.opcode && node.numbers == next.numbers);
    if (node.opcode == kLoop) {
      node.body = LoopBody(std::move(node.body), next.body);
      continue;
    }
    for (size_t a = 0; a < node.affines.size(); ++a) {
      auto& coefficients = node.affines[a].coefficients;
      require(coefficients == next.affines[a].coefficients && coefficients.back() == 0);
      for (int d = kMaxDepth - 1; d > 0; --d) coefficients[d] = coefficients[d - 1];
      coefficients[0] = next.affines[a].base - node.affines[a].base;
    }
  }
  return first;
}

/*!
 * \brief Commands of the steps 0 .. count - 1, with a loop where they repeat.
 *
 * The first `head` and the last `tail` steps may differ from the others. These repeat after `period` steps, with a
 * constant step of each index. Without `loops`, all steps are written out, for comparison.
 */
template <typename Emit>
Nodes Roll(bool loops, const Emit& emit, int64_t count, int64_t period = 1, int64_t head = 1, int64_t tail = 1) {
  auto steps = [&](int64_t begin, int64_t end) {
    Nodes nodes;
    for (int64_t step = begin; step < end; ++step) Append(&nodes, emit(step));
    return nodes;
  };
  const int64_t times = (count - head - tail) / period;
  if (times < 2 || !loops) return steps(0, count);
  Nodes nodes = steps(0, head);
  Node loop{kLoop, {times}, {}, {}};
  loop.body = LoopBody(steps(head, head + period), steps(head + period, head + 2 * period));
  nodes.push_back(std::move(loop));
  Append(&nodes, steps(head + times * period, count));
  return nodes;
}

/*! \brief Offsets of pixels, rows and output channels of commands; rows before `first_row` stay. */
struct Shift {
  int64_t pixels, rows, channels, first_row;

  void Apply(Node* node) const {
    switch (node->opcode) {
      case kLoop:
        for (Node& child : node->body) Apply(&child);
        break;
      case kGwrite:
        node->affines[0].base += pixels;
        break;
      case kGAct:
        if (node->affines[0].base < 0 || node->affines[0].base >= first_row) node->affines[0].base += rows;
        break;
      case kComp:
        node->affines[0].base += rows;
        break;
      case kReadres:
      case kWrbias:
        node->affines[0].base += pixels;
        node->affines[1].base += channels;
        break;
      default:
        break;
    }
  }
};

inline void Encode(const Node& node, Numbers* words) {
  const size_t begin = words->size();
  words->insert(words->end(), {node.opcode, 0});
  auto number = [&](int index) { words->push_back(node.numbers[index]); };
  auto affine = [&](int index) {
    words->push_back(node.affines[index].base);
    words->insert(words->end(), node.affines[index].coefficients.begin(), node.affines[index].coefficients.end());
  };
  number(0);
  switch (node.opcode) {
    case kLoop:
      for (const Node& child : node.body) Encode(child, words);
      break;
    case kGwrite:
      affine(0), number(1), affine(1), number(2);
      break;
    case kGAct:
    case kAfNode:
      affine(0);
      break;
    case kComp:
    case kWrbias:
      affine(0), affine(1), number(1);
      break;
    case kReadres:
      affine(0), affine(1);
      break;
    default:
      TVM_FFI_THROW(RuntimeError) << "no operands of opcode " << node.opcode;
  }
  (*words)[begin + 1] = static_cast<int64_t>(words->size() - begin);
}

}  // namespace pimflow::lowering

#endif  // PIMFLOW_PIM_BACKEND_NODES_H_
