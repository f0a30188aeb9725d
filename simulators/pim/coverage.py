"""Checks what a PIM program computes: is each product of its layer formed once, and read for its output?

Legality does not show this: a program with a deleted READRES or a repeated COMP is still legal. Here, a
program's commands are followed without values: which pixel and which elements of its vector a buffer holds,
which of them each COMP multiplies, to which output a READRES assigns a latch, whether a WRBIAS has set the
initial value of a sum before the first COMP adds to it, and whether an AF has activated it after the last. A
sum may be read before it is complete, and resumed by a WRBIAS; its products are then those of all its
READRESs. A program does not say where the weights lie. But a column of a row holds one piece of one tile of
filters, so all its uses must agree.

This shares no code with the lowering. A program with another order, placement or tiling is just as right.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from pimflow.core.command_tables import COLUMNS, COUNT, KIND, UNIT, A, B, CommandNest
from pimflow.core.commands import KINDS
from pimflow.core.program import PimProgram
from pimflow.simulators.pim.store_coverage import StoreCoverage, is_store_only, store_coverage

MAX_RUNS = 4_000_000  # limit of runs of COMPs and other commands of a channel: some 1.5 GB
_GWRITE, _G_ACT, _COMP, _READRES, _WRITE, _WRBIAS, _AF = range(len(KINDS))


@dataclass(frozen=True, kw_only=True)
class ProductCoverage:
    """Counts of products of elements and weights, over all outputs of a program.

    Attributes
    ----------
    products : int
        Products of the layer: outputs times K. Products with channels of other groups do not count, since
        those weights are zero.
    missing : int
        Products of the layer that are not in what is read for their output.
    repeated : int
        Products that are formed or read again after the first time.
    foreign : int
        Products that are read for an output to which they do not belong: of another pixel, of a row that is
        not open, or of a column that holds other weights according to its other uses.
    unread : int
        Products that no READRES reads.
    misstarted : int
        Outputs that are read and whose sums have a wrong initial value: that of another output, a value whose
        WRBIAS overwrites a sum, zero instead of a value or the reverse; or a sum is resumed that was not read
        before.
    misactivated : int
        Outputs that are read and whose sums end wrongly: the program's AF was not applied exactly once, at
        the end, with the row of the table open; or an AF was applied to a sum without activation, or to one
        that is resumed later.
    """

    products: int
    missing: int
    repeated: int
    foreign: int
    unread: int
    misstarted: int = 0
    misactivated: int = 0

    @property
    def exact(self) -> bool:
        """Whether exactly the products of the layer are read, each once, and all sums start and end right."""
        wrong = (self.missing, self.repeated, self.foreign, self.unread, self.misstarted, self.misactivated)
        return not any(wrong)

    def __str__(self) -> str:
        if self.exact:
            return f"each of {self.products} products formed once"
        counts = {
            "missing": self.missing,
            "repeated": self.repeated,
            "of another output": self.foreign,
            "never read": self.unread,
        }
        faults = ", ".join(f"{n} {kind}" for kind, n in counts.items() if n)
        products = (
            f"of {self.products} products {faults}" if faults else f"{self.products} products formed once"
        )
        products += f"; {self.misstarted} sums start from a wrong value" * bool(self.misstarted)
        return products + f"; {self.misactivated} sums are wrongly activated" * bool(self.misactivated)


def program_coverage(program: PimProgram) -> ProductCoverage | StoreCoverage | None:
    """Coverage of a program, which computes its layer or only stores values; None if it is too long."""
    return store_coverage(program) if is_store_only(program) else product_coverage(program)


def product_coverage(program: PimProgram) -> ProductCoverage | None:
    """Counts of the products that `program`, which must be valid (`PimProgram.validate`), computes.

    Returns
    -------
    Coverage or None
        None if a channel has more than `MAX_RUNS` runs of commands.
    """
    nests: dict[int, CommandNest] = {}  # channels may have the very same words
    for words in map(program.channel_words, range(len(program.channels))):
        if id(words) not in nests:
            nests[id(words)] = CommandNest(words)
    if max(nest.iterations for nest in nests.values()) > MAX_RUNS:
        return None
    g, layer = program.geometry, program.vector_geometry
    reads: list[np.ndarray] = [np.empty((2, 0), np.int64)]
    missing = repeated = foreign = unread = misstarted = misactivated = 0
    known: dict[bytes, tuple[ProductCoverage, np.ndarray]] = {}
    for channel in range(len(program.channels)):
        nest = nests[id(program.channel_words(channel))]
        origin, key = _relative_commands(nest, program)
        if key not in known:
            channel_coverage, sums = _channel_products(nest.expand(), program)
            known[key] = channel_coverage, np.stack(sums) - origin
        channel_coverage, relative_sums = known[key]
        reads.append(relative_sums + origin)
        missing, repeated = missing + channel_coverage.missing, repeated + channel_coverage.repeated
        foreign, unread = foreign + channel_coverage.foreign, unread + channel_coverage.unread
        misstarted = misstarted + channel_coverage.misstarted
        misactivated = misactivated + channel_coverage.misactivated
    pixels, outputs = np.concatenate(reads, axis=1)
    lanes = np.minimum(program.tile_banks, layer.oc - outputs)
    distinct, repeats = _interval_coverage(pixels - program.pixel_begin, outputs, lanes, layer.oc)
    expected = (program.pixel_end - program.pixel_begin) * g.oc
    missing += (expected - distinct) * g.reduction
    repeated += repeats * g.reduction
    return ProductCoverage(
        products=expected * g.reduction,
        missing=missing,
        repeated=repeated,
        foreign=foreign,
        unread=unread,
        misstarted=misstarted,
        misactivated=misactivated,
    )


def _relative_commands(nest: CommandNest, program: PimProgram) -> tuple[np.ndarray, bytes]:
    """The first pixel and output of a channel, [2, 1], and a digest of its commands relative to these.

    Of a dense layer, equal digests mean equal counts: pixels and outputs are only compared with one another,
    and the first output is part of the digest if any has fewer lanes than banks compute. Other channels count
    from 0.
    """
    rows, origin, last_output = nest.rows.copy(), np.zeros((2, 1), np.int64), b""
    if program.geometry.groups == program.matrices == 1:
        at_output = (rows[:, KIND] == _READRES) | (rows[:, KIND] == _WRBIAS)
        for axis, column, is_used in ((0, A, at_output | (rows[:, KIND] == _GWRITE)), (1, B, at_output)):
            if is_used.any():
                origin[axis] = rows[is_used, column].min()
                rows[is_used, column] -= origin[axis]
        full_lanes = program.vector_geometry.oc - program.tile_banks
        if (nest.max_values(B)[at_output] > full_lanes).any():
            last_output = origin[1].tobytes()
    return origin, hashlib.sha256(nest.shape + rows.tobytes() + last_output).digest()


def _channel_products(
    table: np.ndarray, program: PimProgram
) -> tuple[ProductCoverage, tuple[np.ndarray, np.ndarray]]:
    """Coverage of one channel, whose latches are independent; pixel and first output of its sums."""
    K, oc = program.vector_geometry.reduction, program.vector_geometry.oc
    reads = np.flatnonzero(table[:, KIND] == _READRES)
    starts_right, sums = _sums(table, reads, program)
    outputs_read = np.minimum(program.tile_banks, oc - table[reads, B])
    misstarted = int(outputs_read[~starts_right].sum())
    misactivated = int(outputs_read[~_activations(table, reads, sums, program)].sum())
    heads = reads[np.unique(sums, return_index=True)[1]]
    pixels, outputs = table[heads, A], table[heads, B]
    lanes = np.minimum(program.tile_banks, oc - outputs)
    comps = np.flatnonzero(table[:, KIND] == _COMP)
    right_row = _has_open_row(table, comps, program.computing_gangs)
    work, writes = _vectors(table, comps, program)
    owner = np.append(sums, len(heads))[_next_read(table, reads, work[:, 0])]  # the sum of each piece of work
    pixel, first, length = _operands(table, work, writes, program)
    products, is_read = _ProductCounter(program), owner < len(heads)
    unread = int((products.count_any(first, length) * ~is_read).sum())

    sum_index = np.minimum(owner, max(len(heads) - 1, 0))
    is_right = is_read & (length > 0)
    foreign = 0
    if len(heads):
        is_right &= (pixel == pixels[sum_index]) & right_row[work[:, 3]]
        # Pixels of different matrices have different weights for the same output.
        weights = outputs[sum_index] * program.matrices + program.matrix_indices(pixels[sum_index])
        is_right &= _have_same_weights(table, work, weights, first, is_right, program)
        foreign = int(
            products.count(outputs[sum_index], lanes[sum_index], first, length)[is_read & ~is_right].sum()
        )
    distinct, repeats = _interval_coverage(
        sum_index[is_right],
        first[is_right],
        length[is_right],
        K,
        lambda group, begin, count: products.count(outputs[group], lanes[group], begin, count),
    )
    return (
        ProductCoverage(
            products=0,
            missing=int(lanes.sum()) * program.geometry.reduction - distinct,
            repeated=repeats,
            foreign=foreign,
            unread=unread,
            misstarted=misstarted,
            misactivated=misactivated,
        ),
        (pixels, outputs),
    )


def _operands(
    table: np.ndarray, work: np.ndarray, writes: np.ndarray, program: PimProgram
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """For each piece of work, the pixel and the first element in its buffer, and how many elements count."""
    is_written = writes >= 0
    write = table[np.where(is_written, writes, 0)]
    offset = work[:, 1] % program.buffer_columns
    columns = np.maximum(write[:, COLUMNS], 1)
    pixel = np.where(is_written, write[:, A] + offset // columns, -1)
    first = write[:, B] + offset % columns * program.elements_per_column
    remaining = program.vector_geometry.reduction - first
    return pixel, first, np.clip(remaining, 0, work[:, 2] * program.elements_per_column) * is_written


def _sums(table: np.ndarray, reads: np.ndarray, program: PimProgram) -> tuple[np.ndarray, np.ndarray]:
    """For each READRES, whether its sum starts right, and the index of its sum, which several may share.

    A sum starts from the value of `PimProgram.initial`, or is resumed from the result of the READRES before.
    """
    is_right = np.full(len(reads), not program.initial)
    resumed = np.full(len(reads), -1)  # place of the WRBIAS that resumes the sum
    on_latches = np.flatnonzero(np.isin(table[:, KIND], (_COMP, _READRES, _WRBIAS)))
    has_starts = bool((table[:, KIND] == _WRBIAS).any())  # without any, no sum is set or resumed
    for latch in range(program.latches if has_starts else 0):
        places = on_latches[table[on_latches, UNIT] == latch]
        kind = table[places, KIND]
        latch_reads = np.flatnonzero(kind == _READRES)
        ends = np.concatenate(([-1], latch_reads))
        starts = np.flatnonzero(kind == _WRBIAS)
        since = np.searchsorted(starts, ends[:-1], side="right")  # the first WRBIAS after the READRES before
        count = np.searchsorted(starts, latch_reads) - since
        fits = count == (1 if program.initial else 0)
        resume_places = np.full(len(latch_reads), -1)
        if len(starts):
            first = starts[np.minimum(since, len(starts) - 1)]
            start, read = table[places[first]], table[places[latch_reads]]
            resumes = (count > 0) & (start[:, COUNT] == 1)
            # The WRBIAS is the first command on the latch since the READRES before, so no product is lost.
            set_right = (count == 1) & (first == ends[:-1] + 1) & (start[:, B] == read[:, B])
            same_pixel = start[:, A] == read[:, A]
            if program.initial:
                fits &= set_right & (same_pixel | (program.initial == "bias"))
            fits = np.where(resumes, set_right & same_pixel, fits)
            resume_places = np.where(resumes & fits, places[first], -1)
        read_indices = np.searchsorted(reads, places[latch_reads])
        is_right[read_indices], resumed[read_indices] = fits, resume_places
    order = np.lexsort((reads, table[reads, B], table[reads, A]))
    targets = table[reads[order]][:, [A, B]]
    follows = np.append(False, (np.diff(targets, axis=0) == 0).all(axis=1))[: len(order)]
    # A sum that is resumed was read before its WRBIAS.
    before = np.append(-1, reads[order][:-1])[: len(order)]
    continues = (resumed[order] >= 0) & follows & (before < resumed[order])
    is_right[order] &= continues | (resumed[order] < 0)
    sums = np.empty(len(reads), np.int64)
    sums[order] = np.cumsum(~continues) - 1
    return is_right, sums


def _activations(table: np.ndarray, reads: np.ndarray, sums: np.ndarray, program: PimProgram) -> np.ndarray:
    """For each READRES, whether its sum is activated as required: once, if the sum is complete."""
    last = np.zeros(len(reads), bool)
    last[len(reads) - 1 - np.unique(sums[::-1], return_index=True)[1]] = True
    if not (table[:, KIND] == _AF).any():
        return ~last if program.activation else np.ones(len(reads), bool)
    is_right = np.zeros(len(reads), bool)
    on_latches = np.flatnonzero(np.isin(table[:, KIND], (_COMP, _READRES, _WRBIAS, _AF)))
    for latch in range(program.latches):
        places = on_latches[table[on_latches, UNIT] == latch]
        kind = table[places, KIND]
        latch_reads = np.flatnonzero(kind == _READRES)
        applied = np.cumsum(kind == _AF)
        count = np.diff(applied[latch_reads], prepend=0)
        before = np.maximum(latch_reads - 1, 0)
        applies = (latch_reads > 0) & (kind[before] == _AF) & (count == 1)
        applies &= _has_open_row(table, places[before], program.computing_gangs)
        read_indices = np.searchsorted(reads, places[latch_reads])
        is_right[read_indices] = np.where(last[read_indices] & bool(program.activation), applies, count == 0)
    return is_right


def _vectors(table: np.ndarray, comps: np.ndarray, program: PimProgram) -> tuple[np.ndarray, np.ndarray]:
    """Pieces of COMPs that use one vector, and place of the GWRITE that wrote it; -1 for none.

    A piece is: place in `table`, first column, columns, position in `comps`.
    """
    rows = table[comps]
    runs = np.stack([comps, rows[:, B], rows[:, COUNT], np.arange(len(comps))], axis=1)
    writes = _last_writes(table, runs, program)
    offset = runs[:, 1] % program.buffer_columns
    end = offset + runs[:, 2]
    write = table[np.maximum(writes, 0)]
    columns = np.maximum(write[:, COLUMNS], 1)
    has_one_vector = (
        (writes >= 0) & (end <= write[:, COUNT] * columns) & (offset // columns == (end - 1) // columns)
    )
    counts = runs[~has_one_vector, 2]
    single = np.repeat(runs[~has_one_vector], counts, axis=0)
    single[:, 1] += np.arange(len(single)) - np.repeat(np.cumsum(counts) - counts, counts)
    single[:, 2] = 1
    pieces = np.concatenate([runs[has_one_vector], single])
    return pieces, np.concatenate([writes[has_one_vector], _last_writes(table, single, program)])


def _last_writes(table: np.ndarray, work: np.ndarray, program: PimProgram) -> np.ndarray:
    """Place of the last GWRITE that wrote the first column of each piece of work; -1 for none."""
    last_writes = np.full(len(work), -1)
    offset = work[:, 1] % program.buffer_columns
    for buffer in range(program.buffers):
        # A COMP names its latch, which belongs to a buffer.
        buffer_work = np.flatnonzero(table[work[:, 0], UNIT] % program.buffers == buffer)
        writes = np.flatnonzero((table[:, KIND] == _GWRITE) & (table[:, UNIT] == buffer))
        bursts = table[writes, COUNT] * table[writes, COLUMNS]
        last = np.searchsorted(writes, work[buffer_work, 0]) - 1
        # Columns beyond the last GWRITE still hold those of an earlier, longer one.
        unresolved = np.flatnonzero(last >= 0)
        while len(unresolved := unresolved[bursts[last[unresolved]] <= offset[buffer_work[unresolved]]]):
            last[unresolved] -= 1
            unresolved = unresolved[last[unresolved] >= 0]
        last_writes[buffer_work] = np.where(last >= 0, writes[np.maximum(last, 0)] if len(writes) else -1, -1)
    return last_writes


def _has_open_row(table: np.ndarray, comps: np.ndarray, gangs: int) -> np.ndarray:
    """For each COMP or AF, whether its row is open in all gangs that compute."""
    is_open = np.ones(len(comps), bool)
    for gang in range(gangs):
        opens = np.flatnonzero((table[:, KIND] == _G_ACT) & (table[:, UNIT] == gang))
        if not len(opens):
            return np.zeros(len(comps), bool)
        last = np.searchsorted(opens, comps) - 1
        is_open &= (last >= 0) & (table[opens[np.maximum(last, 0)], A] == table[comps, A])
    return is_open


def _next_read(table: np.ndarray, reads: np.ndarray, places: np.ndarray) -> np.ndarray:
    """Position in `reads` of the READRES that reads what a COMP adds; ``len(reads)`` for none."""
    owner = np.full(len(places), len(reads))
    buffers = table[places, UNIT]
    for buffer in np.unique(buffers):
        of_buffer = np.flatnonzero(table[reads, UNIT] == buffer)
        in_buffer = buffers == buffer
        following = np.searchsorted(reads[of_buffer], places[in_buffer])
        owner[in_buffer] = np.append(of_buffer, len(reads))[following]
    return owner


def _have_same_weights(
    table: np.ndarray,
    work: np.ndarray,
    output: np.ndarray,
    first: np.ndarray,
    is_right: np.ndarray,
    program: PimProgram,
) -> np.ndarray:
    """For each piece of work, whether its columns hold the weights that most of their uses assume."""
    cell = table[work[:, 0], A] * program.columns_per_row + work[:, 1]
    uses = np.stack([cell, work[:, 2], output, first], axis=1)[is_right]
    # Count equal uses together: programs use the same weights for thousands of pixels.
    same, inverse, times = _distinct(uses)
    counts = same[:, 1]
    use = np.repeat(np.arange(len(same)), counts)
    step = np.arange(len(use)) - np.repeat(np.cumsum(counts) - counts, counts)
    begin = same[use, 3] + step * program.elements_per_column
    real = begin < program.vector_geometry.reduction
    use, step, begin = use[real], step[real], begin[real]
    contents = np.stack([same[use, 0] + step, same[use, 2], begin], axis=1)
    meanings, meaning, _ = _distinct(contents)
    uses_of = np.bincount(meaning, weights=times[use], minlength=len(meanings))
    order = np.lexsort((-uses_of, meanings[:, 0]))
    wins = np.zeros(len(meanings), bool)
    wins[order[np.append(True, np.diff(meanings[order, 0]) != 0)[: len(order)]]] = True
    agrees = np.ones(len(same), bool)
    np.logical_and.at(agrees, use, wins[meaning])
    result = np.zeros(len(work), bool)
    result[is_right] = agrees[inverse]
    return result


def _distinct(rows: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Distinct rows of non-negative integers, sorted; the index of each row in them; their counts."""
    key = np.zeros(len(rows), np.int64)
    for column in rows.T:
        _, rank = np.unique(column, return_inverse=True)
        # Ranks are renumbered after each column, so that they stay below the number of rows.
        _, key = np.unique(key * (int(rank.max(initial=0)) + 1) + rank.reshape(-1), return_inverse=True)
        key = key.reshape(-1)
    _, place, times = np.unique(key, return_index=True, return_counts=True)
    return rows[place], key, times


def _interval_coverage(
    group: np.ndarray,
    begin: np.ndarray,
    length: np.ndarray,
    total: int,
    measure: Callable[[np.ndarray, np.ndarray, np.ndarray], np.ndarray] = lambda _, __, length: length,
) -> tuple[int, int]:
    """How much of ``[0, whole)`` the intervals of each group cover, and how much they cover repeatedly.

    Parameters
    ----------
    measure : callable
        Measure of an interval, from its group, begin and length; its length by default.
    """
    start = group * (total + 1) + begin
    order = np.argsort(start, kind="stable")
    start, end, group = start[order], (start + length)[order], group[order]
    covered_end = np.append(np.int64(-1), np.maximum.accumulate(end)[:-1])[: len(end)]
    fresh = np.maximum(end - np.maximum(start, covered_end), 0)
    # The part of an interval that was not covered before lies at its end.
    covered, distinct = (
        int(measure(group, end - count - group * (total + 1), count).sum()) for count in (end - start, fresh)
    )
    return distinct, covered - distinct


class _ProductCounter:
    """Counts products of the layer between elements of a vector and output channels of its matrix.

    All pairs are products of a dense layer; of a grouped convolution, only those of the same group.
    """

    def __init__(self, program: PimProgram):
        layer, self.vectors = program.geometry, program.vector_geometry
        self.is_dense = layer.groups == program.matrices or layer.groups == 1
        self.outputs, channels = layer.oc // layer.groups, layer.c // layer.groups
        self.all_outputs = program.tile_banks if self.is_dense else self.outputs
        group = np.arange(self.vectors.reduction) % self.vectors.c // channels
        # [output groups, K + 1]: number of elements of the group before each element.
        same = group == np.arange(self.vectors.oc // self.outputs)[:, None]
        self.before = np.concatenate((np.zeros((len(same), 1), np.int64), np.cumsum(same, axis=1)), axis=1)

    def count(
        self, output: np.ndarray, lanes: np.ndarray, begin: np.ndarray, length: np.ndarray
    ) -> np.ndarray:
        """Products of `lanes` output channels from `output` on with `length` elements from `begin` on."""
        if self.is_dense:
            return np.asarray(lanes * length)
        begin, end = (np.clip(bound, 0, self.vectors.reduction) for bound in (begin, begin + length))
        total = np.zeros(len(output), np.int64)
        for index, before in enumerate(self.before):
            first = np.maximum(output, index * self.outputs)
            overlap = np.minimum(output + lanes, (index + 1) * self.outputs) - first
            total += np.maximum(overlap, 0) * (before[end] - before[begin])
        return total

    def count_any(self, begin: np.ndarray, length: np.ndarray) -> np.ndarray:
        """Products with as many outputs as a COMP has, where no READRES names the outputs."""
        return length * self.all_outputs
