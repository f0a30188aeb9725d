/*!
 * \brief Makes the command streams of a convolution in matrix-vector form, channel by channel, in blocks of pixels
 * by tiles.
 *
 * `schedule.py` assigns the blocks to channels, and explains the terms.
 */
#include <tvm/ffi/container/array.h>
#include <tvm/ffi/container/map.h>
#include <tvm/ffi/container/tensor.h>
#include <tvm/ffi/reflection/registry.h>
#include <tvm/ffi/string.h>

#include <array>
#include <map>
#include <optional>
#include <tuple>

#include "loop_nest.h"

namespace pimflow::lowering {
namespace {

using Fields = ffi::Map<ffi::String, int64_t>;
using Buffers = std::vector<int64_t>;
using Tiles = std::vector<int64_t>;

/*! \brief Sizes of a device that decide the commands, in cycles and columns. */
struct Device {
  int64_t buffer_columns;
  int64_t activation_gap;  // between G_ACTs
  int64_t precharge, opening, burst;
  int64_t turn_columns;  // COMP columns that fit into a turnaround of the bus
};

/*! \brief Size of a block: pixels by tiles. */
struct BlockSize {
  int64_t pixels, tiles, first_tile;

  bool operator<(const BlockSize& x) const {
    return std::tie(pixels, tiles, first_tile) < std::tie(x.pixels, x.tiles, x.first_tile);
  }
};

/*! \brief A block of a channel: `row` is that of tile 0; indices count from `pixel` and `channel`. */
struct Block {
  BlockSize size;
  int64_t row, pixel, channel;

  std::array<int64_t, 6> Key() const {
    return {size.pixels, size.tiles, size.first_tile, row, pixel, channel};
  }
};

/*! \brief Arguments of the lowering; see `lower` in Python. */
struct Layer {
  explicit Layer(const Fields& fields)
      : order{static_cast<Stationary>(fields.at("stationary")),
              fields.at("buffers"),
              fields.at("pixels"),
              fields.at("gangs"),
              fields.at("accumulators"),
              fields.at("staggered") != 0,
              fields.at("overlap") != 0,
              fields.at("resumed") != 0,
              fields.at("loops") != 0},
        tiling{
            fields.at("chunks"),  fields.at("columns"), fields.at("chunks_per_row"), fields.at("elements_per_column"),
            fields.at("outputs"), fields.at("tiles"),   fields.at("matrices")},
        device{fields.at("buffer_columns"), fields.at("activation_gap"), fields.at("precharge"),
               fields.at("opening"),        fields.at("burst"),          fields.at("turn_columns")},
        initial(fields.at("initial") != 0),
        matrix_stride(fields.at("matrix_stride")),
        table_row(fields.at("table_row")) {}

  LoopOrder order;
  BankTiling tiling;
  Device device;
  bool initial;       // whether latches are set before sums begin
  int64_t matrix_stride;  // pixels between the vectors of a pixel for two matrices
  int64_t table_row;  // of the activation function; -1 without one
};

/*!
 * \brief Makes the commands of blocks, with pixels, rows and output channels relative to the first of the block.
 *
 * Rows count from the one after the table of an activation function. The row of the table is opened once for the
 * results of all latches, so the bus does not work in parallel with COMPs.
 */
class Streams {
 public:
  explicit Streams(const Layer& layer)
      : layer_(layer),
        order_(layer.order),
        tiling_(layer.tiling),
        activates_(layer.table_row >= 0),
        first_row_(layer.table_row + 1),
        overlap_(layer.order.overlap && !activates_) {}

  Nodes BlockNodes(const Block& block) {
    auto entry = blocks_.find(block.size);
    if (entry == blocks_.end()) entry = blocks_.emplace(block.size, SizeNodes(block.size)).first;
    Nodes nodes = entry->second;
    const Shift shift{block.pixel, block.row - first_row_, block.channel, first_row_};
    for (Node& node : nodes) shift.Apply(&node);
    return nodes;
  }

  /*! \brief Commands of one pixel in all phases: accumulators that a phase does not use take tiles of the next. */
  Nodes OnePixel(const Tiles& tiles, const std::map<int64_t, int64_t>& rows, int64_t pixel, int64_t row) {
    Nodes nodes;
    int64_t turn = 0;
    for (const Tiles& group : AccumulatorGroups(tiles)) Append(&nodes, Pixel(group, rows, turn++, 0));
    const Shift shift{pixel, row - first_row_, 0, first_row_};
    for (Node& node : nodes) shift.Apply(&node);
    return nodes;
  }

 private:
  Nodes SizeNodes(const BlockSize& size) {
    Tiles tiles(size.tiles);
    std::iota(tiles.begin(), tiles.end(), size.first_tile);
    if (order_.resumed) {
      return Roll(order_.loops, [&](int64_t pixel) { return ResumedPixel(tiles, pixel); }, size.pixels);
    }
    if (order_.accumulators == 1) {
      const LoopNest nest(order_, tiling_, size.pixels, size.first_tile, size.tiles, layer_.matrix_stride);
      return nest.Commands([&](const RowIteration* previous, const RowIteration& iteration, const RowIteration* next) {
        return IterationNodes(previous, iteration, next);
      });
    }
    const std::vector<Tiles> groups = AccumulatorGroups(tiles);
    const bool one_pixel = size.pixels == 1;
    auto group = [&](int64_t turn) {
      auto products = [&](int64_t pixel) { return Pixel(groups[turn], {}, one_pixel ? turn : 0, pixel); };
      return Roll(order_.loops, products, size.pixels, 2);
    };
    return Roll(order_.loops, group, static_cast<int64_t>(groups.size()), GroupPeriod() * (one_pixel ? 2 : 1));
  }

  /*! \brief Number of groups of tiles (one for each accumulator) after which positions in rows repeat. */
  int64_t GroupPeriod() const { return tiling_.Period() / std::gcd(tiling_.Period(), order_.accumulators); }

  std::vector<Tiles> AccumulatorGroups(const Tiles& tiles) const {
    std::vector<Tiles> groups;
    for (size_t begin = 0; begin < tiles.size(); begin += order_.accumulators) {
      const size_t end = std::min(tiles.size(), begin + order_.accumulators);
      groups.emplace_back(tiles.begin() + begin, tiles.begin() + end);
    }
    return groups;
  }

  static RowIteration PixelIteration(int64_t tile, int64_t chunk, int64_t pixel) {
    return RowIteration(tile, chunk, {Contents{pixel, 1}}, true);
  }

  /*!
   * \brief All products of a pixel with the tiles that the accumulators hold, then the results.
   *
   * Every second pixel goes backwards over the rows, and so begins with the open row; every second turn of one
   * pixel goes backwards over its chunks, and so begins with the chunk in the buffer. `rows` has, by tile, the row in
   * which tile 0 would lie, where it is not the first.
   */
  Nodes Pixel(const Tiles& tiles, const std::map<int64_t, int64_t>& rows, int64_t turn, int64_t pixel) const {
    std::vector<std::pair<int64_t, int64_t>> steps;  // chunk, latch
    for (int64_t i = 0; i < tiling_.chunks; ++i) {
      // Tiles of a turn keep their order, so that a channel without the last one stays in lockstep.
      const int64_t chunk = turn % 2 ? tiling_.chunks - 1 - i : i;
      for (size_t latch = 0; latch < tiles.size(); ++latch) steps.emplace_back(chunk, latch);
    }
    if (pixel % 2) std::reverse(steps.begin(), steps.end());
    const auto [first_chunk, first_latch] = steps.front();
    // With several pixels, `rows` is empty.
    int64_t open_row = pixel && !activates_ ? RowIndex(tiles[first_latch], first_chunk) : -1;
    int64_t written_chunk = turn ? first_chunk : -1;
    Nodes nodes;
    if (layer_.initial) {
      for (size_t latch = 0; latch < tiles.size(); ++latch) {
        nodes.push_back(WithLatch(SetLatch(PixelIteration(tiles[latch], 0, pixel), 0, 0), latch));
      }
    }
    for (const auto& [chunk, latch] : steps) {
      const RowIteration iteration = PixelIteration(tiles[latch], chunk, pixel);
      if (chunk != written_chunk) nodes.push_back(Write(iteration, 0));
      written_chunk = chunk;
      const auto offset = rows.find(iteration.tile);
      const int64_t row = RowIndex(iteration) + (offset == rows.end() ? 0 : offset->second);
      if (row != open_row) Append(&nodes, OpenRow(row));
      open_row = row;
      nodes.push_back(WithLatch(Products(iteration, 0, 0, row), latch));
    }
    Append(&nodes, Activate(Latches(tiles.size())));
    for (size_t latch = 0; latch < tiles.size(); ++latch) {
      nodes.push_back(WithLatch(Read(PixelIteration(tiles[latch], 0, pixel), 0, 0), latch));
    }
    return nodes;
  }

  /*!
   * \brief All products of a pixel: each chunk with all tiles, in groups of one tile for each accumulator.
   *
   * Every second chunk goes backwards over the tiles, and so begins with the sums in the latches.
   */
  Nodes ResumedPixel(const Tiles& tiles, int64_t pixel) const {
    std::vector<Tiles> groups = AccumulatorGroups(tiles);
    Nodes nodes;
    for (int64_t chunk = 0; chunk < tiling_.chunks; ++chunk) {
      auto part = [&](int64_t turn) { return ResumedPart(groups, chunk, pixel, turn); };
      Append(&nodes, Roll(order_.loops, part, static_cast<int64_t>(groups.size()), GroupPeriod(), 2, 2));
      std::reverse(groups.begin(), groups.end());
    }
    return nodes;
  }

  /*! \brief Products of a chunk with the tiles of one turn: sums are resumed before, and read after them. */
  Nodes ResumedPart(const std::vector<Tiles>& groups, int64_t chunk, int64_t pixel, int64_t turn) const {
    const Tiles& part = groups[turn];
    const bool begins = turn == 0, ends = turn + 1 == static_cast<int64_t>(groups.size());
    const bool last = chunk == tiling_.chunks - 1;
    auto iteration = [&](size_t latch) { return PixelIteration(part[latch], chunk, pixel); };
    Nodes nodes;
    if (begins) nodes.push_back(Write(iteration(0), 0));
    if ((chunk && !begins) || (layer_.initial && !chunk)) {
      for (size_t latch = 0; latch < part.size(); ++latch) {
        nodes.push_back(WithLatch(SetLatch(iteration(latch), 0, 0), latch));
        nodes.back().numbers[1] = chunk > 0;
      }
    }
    int64_t open_row = -1;
    if (!begins && !(last && activates_)) {
      open_row = RowIndex(groups[turn - 1].back(), chunk);
    } else if (begins && chunk) {  // the tiles with which the chunk before ended
      open_row = RowIndex(part.back(), chunk - 1);
    }
    for (size_t latch = 0; latch < part.size(); ++latch) {
      const int64_t row = RowIndex(iteration(latch));
      if (row != open_row) Append(&nodes, OpenRow(row));
      open_row = row;
      nodes.push_back(WithLatch(Products(iteration(latch), 0, 0, row), latch));
    }
    if (last) Append(&nodes, Activate(Latches(part.size())));
    if (last || !ends) {
      for (size_t latch = 0; latch < part.size(); ++latch)
        nodes.push_back(WithLatch(Read(iteration(latch), 0, 0), latch));
    }
    return nodes;
  }

  /*!
   * \brief Commands of one iteration, the READRESs of the one before, and the GWRITEs for the next.
   *
   * A buffer is written for the next iteration as soon as its last product is formed, so that the bus works while the
   * other buffers compute. The last buffer waits for the READRESs in between, and is written in the next iteration. Bus
   * commands are interleaved with the first products.
   */
  Nodes IterationNodes(const RowIteration* previous, const RowIteration& iteration, const RowIteration* next) const {
    const int64_t row = RowIndex(iteration);
    Buffers late = LateBuffers(previous, iteration);
    Nodes bus, nodes;
    if (previous) Append(&bus, ReadResults(*previous));
    if (layer_.initial && (!previous || previous->complete)) {
      for (int64_t b : iteration.active) bus.push_back(SetLatch(iteration, b, 0));
    }
    if (!overlap_) {
      nodes = std::move(bus);
      for (int64_t b : late) nodes.push_back(Write(iteration, b));
      bus.clear();
      late.clear();
    }
    if (!previous || RowIndex(*previous) != row || (previous->complete && activates_)) {
      const Nodes opens = OpenRow(row);
      if (!late.empty()) {
        OpenAndWrite(opens, iteration, &late, &nodes);
      } else if (!iteration.ChangedBuffers(previous).empty()) {
        Append(&nodes, opens);
      } else {
        nodes.push_back(opens.front());
        Append(&nodes, std::move(bus));
        nodes.insert(nodes.end(), opens.begin() + 1, opens.end());
        bus.clear();
      }
    }
    for (int64_t b : late) bus.push_back(Write(iteration, b));
    for (int64_t b : EarlyBuffers(iteration, next)) bus.push_back(Write(*next, b));
    IterationProducts(iteration, next, row, std::move(bus), &nodes);
    if (!next) Append(&nodes, ReadResults(iteration));
    return nodes;
  }

  Nodes OpenRow(int64_t row) const {
    Nodes nodes;
    for (int64_t gang = 0; gang < order_.gangs; ++gang) nodes.push_back(Node{kGAct, {gang}, {Affine{row}}, {}});
    return nodes;
  }

  static Buffers Latches(size_t count) {
    Buffers latches(count);
    std::iota(latches.begin(), latches.end(), 0);
    return latches;
  }

  /*! \brief AFs of `latches`, whose sums are complete, in the opened row of the table; none without activation. */
  Nodes Activate(const Buffers& latches) const {
    if (!activates_) return {};
    Nodes nodes = OpenRow(layer_.table_row);
    for (int64_t b : latches) nodes.push_back(Node{kAfNode, {b}, {Affine{layer_.table_row}}, {}});
    return nodes;
  }

  /*! \brief Open a row, and meanwhile write as many of the `late` buffers as fit. */
  void OpenAndWrite(const Nodes& opens, const RowIteration& iteration, Buffers* late, Nodes* nodes) const {
    const Device& n = layer_.device;
    int64_t clock = n.precharge, free = 0;
    for (size_t i = 0; i <= opens.size(); ++i) {
      const int64_t end = i < opens.size() ? clock : clock - n.activation_gap + n.opening;
      while (!late->empty() && free <= end) {
        const Node write = Write(iteration, late->front());
        late->erase(late->begin());
        free += Bursts(write) * n.burst;
        nodes->push_back(write);
      }
      if (i < opens.size()) nodes->push_back(opens[i]);
      clock += n.activation_gap;
    }
  }

  /*! \brief Buffers that this iteration does not use, and that can be written while it reads no results. */
  Buffers EarlyBuffers(const RowIteration& iteration, const RowIteration* next) const {
    if (!next || !overlap_) return {};
    for (const Contents& contents : iteration.contents) {
      if (contents.pixels > 1) return {};
    }
    Buffers idle;
    for (int64_t b : next->ChangedBuffers(&iteration)) {
      if (!iteration.IsActive(b)) idle.push_back(b);
    }
    if (idle.empty()) return idle;
    const int64_t pixels = next->contents[idle.front()].pixels;
    const size_t count = std::max<size_t>(1, iteration.active.size() / pixels);
    idle.resize(std::min(idle.size(), count));
    return idle;
  }

  /*! \brief Buffers of `iteration` that were not written during the iteration before. */
  Buffers LateBuffers(const RowIteration* previous, const RowIteration& iteration) const {
    const Buffers writes = iteration.ChangedBuffers(previous);
    if (!previous || !overlap_) return writes;
    Buffers written_buffers = EarlyBuffers(*previous, &iteration);
    written_buffers.insert(written_buffers.end(), previous->active.begin(),
                           previous->active.end() - (previous->complete ? 1 : 0));
    Buffers late;
    for (int64_t b : writes) {
      if (std::find(written_buffers.begin(), written_buffers.end(), b) == written_buffers.end()) late.push_back(b);
    }
    return late;
  }

  /*! \brief COMPs of an iteration with READRESs between slots, interleaved with the remaining `bus` commands. */
  void IterationProducts(const RowIteration& iteration, const RowIteration* next, int64_t row, Nodes bus,
                         Nodes* nodes) const {
    const Buffers writes = next && overlap_ ? next->ChangedBuffers(&iteration) : Buffers();
    auto count_of = [&](int64_t b) { return iteration.contents[b].pixels; };
    int64_t max_pixels = 0;
    for (int64_t b : iteration.active) max_pixels = std::max(max_pixels, count_of(b));
    for (int64_t slot = 0; slot < max_pixels;) {
      Buffers active, ending;
      int64_t run = max_pixels;
      for (int64_t b : iteration.active) {
        if (count_of(b) <= slot) continue;
        active.push_back(b);
        run = std::min(run, count_of(b));
        const bool is_written = std::find(writes.begin(), writes.end(), b) != writes.end();
        if (count_of(b) == slot + 1 && is_written) ending.push_back(b);
      }
      run -= 1 + slot;
      if (slot && run > 0) {
        Node loop{kLoop, {run}, {}, SlotIteration(iteration, active, slot, row)};
        nodes->push_back(std::move(loop));
        slot += run;
        continue;
      }
      if (slot && !ending.empty()) {
        bus.clear();
        for (int64_t b : active) Append(&bus, NextSlot(iteration, b, slot, 0));
      }
      if (slot && activates_) Append(nodes, NextSlots(iteration, active, slot, row, 0));
      for (int64_t b : active) {
        if (slot && ending.empty() && !activates_) Append(nodes, NextSlot(iteration, b, slot, 0));
        Interleave(Products(iteration, b, slot, row), b, &bus, nodes);
        const bool ends = std::find(ending.begin(), ending.end(), b) != ending.end();
        if (ends && (b != iteration.active.back() || !iteration.complete)) {
          Append(nodes, std::move(bus));
          bus = {Write(*next, b)};
        }
      }
      ++slot;
      Append(nodes, std::move(bus));
      bus.clear();
    }
  }

  /*!
   * \brief Append a run of COMPs, interleaved with commands of `bus`: those that must precede it come first, others
   * between its parts, as soon as the bus is free. Commands that do not fit stay in `bus`.
   */
  void Interleave(const Node& comp, int64_t buffer, Nodes* bus, Nodes* nodes) const {
    size_t leading = 0;  // commands of its buffer, and a GWRITE right after them
    for (size_t i = 0; i < bus->size(); ++i) {
      if ((*bus)[i].numbers[0] == buffer) leading = i + 1;
    }
    if (leading && (*bus)[leading - 1].opcode == kGwrite) leading = std::min(bus->size(), leading + 1);
    nodes->insert(nodes->end(), bus->begin(), bus->begin() + leading);
    size_t next = leading;
    int64_t placed = 0;
    const int64_t count = comp.numbers[1];
    for (const Node* last = nullptr; next < bus->size(); ++next) {
      const Node& node = (*bus)[next];
      int64_t step = 1;
      if (node.opcode == kGwrite && last) {
        step = last->opcode == kGwrite ? Bursts(*last) : layer_.device.turn_columns;
      }
      if (placed + step > count) break;
      nodes->push_back(Part(comp, placed, step));
      nodes->push_back(node);
      last = &node;
      placed += step;
    }
    if (placed < count) nodes->push_back(Part(comp, placed, count - placed));
    bus->erase(bus->begin(), bus->begin() + next);
  }

  static Node Part(Node comp, int64_t begin, int64_t count) {
    comp.affines[1].base += begin;
    comp.numbers[1] = count;
    return comp;
  }

  int64_t RowIndex(int64_t tile, int64_t chunk) const { return first_row_ + tiling_.Row(tile, chunk); }
  int64_t RowIndex(const RowIteration& iteration) const { return RowIndex(iteration.tile, iteration.chunk); }

  static Node WithLatch(Node node, size_t latch) {
    node.numbers[0] = static_cast<int64_t>(latch);
    return node;
  }

  static int64_t Bursts(const Node& gwrite) { return gwrite.numbers[1] * gwrite.numbers[2]; }

  Node Write(const RowIteration& iteration, int64_t buffer) const {
    const Contents& contents = iteration.contents[buffer];
    const int64_t element = iteration.chunk * tiling_.columns * tiling_.elements_per_column;
    return Node{kGwrite, {buffer, contents.pixels, tiling_.columns}, {Affine{contents.first}, Affine{element}}, {}};
  }

  /*! \brief The COMPs of a slot, which advances by `step` in each iteration of a loop, as in the next functions. */
  Node Products(const RowIteration& iteration, int64_t buffer, int64_t slot, int64_t row, int64_t step = 0) const {
    const int64_t place = tiling_.PlaceInRow(iteration.tile, iteration.chunk) * layer_.device.buffer_columns;
    const Affine column{place + slot * tiling_.columns, {step * tiling_.columns}};
    return Node{kComp, {buffer, tiling_.columns}, {Affine{row}, column}, {}};
  }

  Node Read(const RowIteration& iteration, int64_t buffer, int64_t slot, int64_t step = 0) const {
    const Affine pixel{iteration.contents[buffer].first + slot, {step}};
    return Node{kReadres, {buffer}, {pixel, Affine{tiling_.Channel(iteration.tile)}}, {}};
  }

  Node SetLatch(const RowIteration& iteration, int64_t buffer, int64_t slot, int64_t step = 0) const {
    Node node = Read(iteration, buffer, slot, step);
    node.opcode = kWrbias;
    return node;
  }

  /*! \brief Between two slots of a buffer: read the latch, and set it for the next. */
  Nodes NextSlot(const RowIteration& iteration, int64_t buffer, int64_t slot, int64_t step) const {
    Nodes nodes{Read(iteration, buffer, slot - 1, step)};
    if (layer_.initial) nodes.push_back(SetLatch(iteration, buffer, slot, step));
    return nodes;
  }

  /*! \brief Between two slots of all buffers: activate, read and set latches, and reopen the row. */
  Nodes NextSlots(const RowIteration& iteration, const Buffers& buffers, int64_t slot, int64_t row,
                  int64_t step) const {
    Nodes nodes = Activate(buffers);
    for (int64_t b : buffers) Append(&nodes, NextSlot(iteration, b, slot, step));
    Append(&nodes, OpenRow(row));
    return nodes;
  }

  /*! \brief One iteration of the loop over slots from `slot` on: read the slot before, compute this one. */
  Nodes SlotIteration(const RowIteration& iteration, const Buffers& buffers, int64_t slot, int64_t row) const {
    Nodes nodes;
    if (activates_) nodes = NextSlots(iteration, buffers, slot, row, 1);
    for (int64_t b : buffers) {
      if (!activates_) Append(&nodes, NextSlot(iteration, b, slot, 1));
      nodes.push_back(Products(iteration, b, slot, row, 1));
    }
    return nodes;
  }

  /*! \brief READRESs of the results in the latches after an iteration: those of the last slot of each buffer. */
  Nodes ReadResults(const RowIteration& iteration) const {
    if (!iteration.complete) return {};
    Nodes nodes = Activate(iteration.active);
    for (int64_t b : iteration.active) nodes.push_back(Read(iteration, b, iteration.contents[b].pixels - 1));
    return nodes;
  }

  const Layer& layer_;
  const LoopOrder& order_;
  const BankTiling& tiling_;
  const bool activates_;
  const int64_t first_row_;
  const bool overlap_;
  std::map<BlockSize, Nodes> blocks_;
};

const Node* FirstWrite(const Nodes& nodes, int* count) {
  const Node* first = nullptr;
  for (const Node& node : nodes) {
    const Node* first_in_body = nullptr;
    if (node.opcode == kLoop) first_in_body = FirstWrite(node.body, count);
    if (node.opcode == kGwrite) first_in_body = &node, ++*count;
    if (!first) first = first_in_body;
  }
  return first;
}

/*! \brief Concatenate blocks; a vector that stays in its buffer is written only once. */
Nodes ConcatenateBlocks(const std::vector<Nodes>& blocks) {
  Nodes concatenated;
  std::optional<Node> vector;
  for (const Nodes& nodes : blocks) {
    const auto first = std::find_if(nodes.begin(), nodes.end(), [](const Node& n) { return n.opcode != kWrbias; });
    for (auto node = nodes.begin(); node != nodes.end(); ++node) {
      if (node != first || !vector || !(*node == *vector)) concatenated.push_back(*node);
    }
    int count = 0;
    const Node* write = FirstWrite(nodes, &count);
    vector = count == 1 ? std::optional<Node>(*write) : std::nullopt;
  }
  return concatenated;
}

/*! \brief A block of a channel: its pixels and tiles, and the row of tile 0. */
PIMFLOW_RECORD(BlockRow, int64_t, channel, pixel, pixels, tile, tiles, row);

/*! \brief What all channels of a program have in common; see `LowerStreams`. */
struct StreamOptions {
  explicit StreamOptions(const Fields& fields)
      : pixel_begin(fields.at("pixel_begin")),
        row_begin(fields.at("row_begin")),
        one_pixel(fields.at("one_pixel") != 0),
        shares_accumulators(fields.at("shares_accumulators") != 0),
        timing_only(fields.at("timing_only") != 0) {}

  int64_t pixel_begin, row_begin;
  bool one_pixel, shares_accumulators, timing_only;
};

/*! \brief The blocks of a channel; where phases share accumulators, its tiles too, with the row of tile 0 for each. */
struct ChannelBlocks {
  std::vector<Block> blocks;
  Tiles tiles;
  std::map<int64_t, int64_t> rows;

  void Add(const BlockRow& row, const Layer& layer, const StreamOptions& options) {
    // Positions in rows depend only on the remainder.
    const int64_t first = row.tile % layer.tiling.Period(), skipped = row.tile - first;
    blocks.push_back(Block{{row.pixels, row.tiles, first},
                           layer.tiling.Row(skipped, 0) + options.row_begin + row.row,
                           row.pixel + options.pixel_begin + layer.tiling.Matrix(skipped) * layer.matrix_stride,
                           layer.matrix_stride ? 0 : skipped * layer.tiling.outputs});
    for (int64_t tile = row.tile; options.shares_accumulators && tile < row.tile + row.tiles; ++tile) {
      tiles.push_back(tile);
      rows[tile] = row.row;
    }
  }

  /*! \brief Drop the pixels and output channels that do not affect time. */
  void ReduceToTiming(const StreamOptions& options) {
    const int64_t first = blocks.empty() ? 0 : blocks.front().pixel;
    for (Block& block : blocks) block.pixel = (block.pixel - first) * options.one_pixel, block.channel = 0;
  }

  std::vector<std::array<int64_t, 6>> Key() const {
    std::vector<std::array<int64_t, 6>> key;
    for (const Block& block : blocks) key.push_back(block.Key());
    return key;
  }

  Nodes Lower(Streams& streams, const StreamOptions& options) const {
    if (options.shares_accumulators) return streams.OnePixel(tiles, rows, options.pixel_begin, options.row_begin);
    std::vector<Nodes> parts;
    for (const Block& block : blocks) parts.push_back(streams.BlockNodes(block));
    if (options.one_pixel) return ConcatenateBlocks(parts);
    Nodes nodes;
    for (Nodes& part : parts) Append(&nodes, std::move(part));
    return nodes;
  }
};

/*!
 * \brief The streams of all channels.
 *
 * \param fields See `Layer`; also `pixel_begin`, `row_begin`; `one_pixel`: whether there is only one, so that blocks
 *   may share its vector; `shares_accumulators`: whether its phases also share accumulators; `timing_only`: see `lower`
 *   in Python.
 * \param blocks A `BlockRow` each, ordered by channel.
 * \return Words of all distinct streams, concatenated; where each begins; and the index of each channel's stream.
 */
ffi::Array<ffi::Tensor> LowerStreams(const Fields& fields, const ffi::TensorView& blocks, int64_t channels) {
  const Layer layer(fields);
  const StreamOptions options(fields);
  const RecordTable<BlockRow> table(blocks);
  Streams streams(layer);
  Numbers words, begins{0}, stream_indices;
  std::map<std::vector<std::array<int64_t, 6>>, int64_t> stream_by_blocks;
  const BlockRow* row = table.begin();
  for (int64_t channel = 0; channel < channels; ++channel) {
    ChannelBlocks channel_blocks;
    for (; row < table.end() && row->channel == channel; ++row) channel_blocks.Add(*row, layer, options);
    if (options.timing_only) channel_blocks.ReduceToTiming(options);
    const auto next = static_cast<int64_t>(begins.size()) - 1;
    const auto [stream, is_new] = stream_by_blocks.emplace(channel_blocks.Key(), next);
    stream_indices.push_back(stream->second);
    if (!is_new) continue;
    for (const Node& node : channel_blocks.Lower(streams, options)) Encode(node, &words);
    begins.push_back(static_cast<int64_t>(words.size()));
  }
  return {WordTensor(words), WordTensor(begins), WordTensor(stream_indices)};
}

TVM_FFI_STATIC_INIT_BLOCK() {
  DefineRecord<BlockRow>("pimflow.pim_backend.block");
  tvm::ffi::reflection::GlobalDef().def("pimflow.pim_backend.lower_streams", LowerStreams);
}

}  // namespace
}  // namespace pimflow::lowering
