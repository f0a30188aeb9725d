"""Cycles of products on PIM, beside those of other simulators and the lower bound of row activations.

Reference cycles, all without refresh unless said:

- AiM: what the public AiM simulator (arkhadem/aim_simulator at 0f28a07) printed for traces written by the
  rules of CENT (ASPLOS 2025; Yufeng98/CENT at 8c79786), 8 channels.
- NeuPIMs (ASPLOS 2024): the formula of its scheduler, 100 cycles a GWRITE and 184 a row.
- AttAcc (ASPLOS 2024): runs that scale-snu/attacc_simulator at c600051 keeps in its ``ramulator.out``, with
  refresh, both products and the softmax between.
"""

from __future__ import annotations

import csv
import os
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from calibration.latency_bound import mode_changes, row_limited_ns

from pimflow.core.attention import Attention
from pimflow.core.kernel import ELEMENT_BYTES, ConvGeometry
from pimflow.hardware import PimSpec
from pimflow.pim_backend.programs import attention as programs
from pimflow.pim_backend.programs.cache_layout import KeyLayout, ValueLayout
from pimflow.pim_backend.programs.cache_schedule import KEYS, VALUES, ProductLayout, all_schedules
from pimflow.pim_backend.programs.lowering import ProgramRequest, lower
from pimflow.pim_backend.programs.schedule import schedules
from pimflow.simulators.profiler import BuiltIn, PimProfiler

STRICT = BuiltIn()
AIM_CHANNELS = 8
# Product, accumulators of a bank, cycles of the AiM simulator.
AIM_ATTENTION = (
    ("QK^T", 1024, 1, 28_928),
    ("QK^T", 4096, 1, 115_712),
    ("QK^T", 4096, 8, 41_600),
    ("QK^T", 4096, 32, 36_320),
    ("SV", 1024, 1, 9_664),
    ("SV", 4096, 1, 38_656),
    ("SV", 4096, 8, 32_496),
)
# Inputs, outputs, channels, accumulators, cycles.
AIM_WEIGHTS = (
    (1024, 16, 1, 1, 414),
    (4096, 4096, 1, 32, 238_816),
    (4096, 4096, 8, 32, 30_300),
    (4096, 4096, 8, 1, 37_120),
    (4096, 4096, 32, 32, 8_124),
    (4096, 11008, 8, 32, 80_636),
    (11008, 4096, 8, 32, 82_269),
    (576, 1536, 8, 32, 2_227),
    (576, 576, 8, 32, 1_002),
)
NEUPIMS_GWRITE, NEUPIMS_ROW, NEUPIMS_BANKS, NEUPIMS_ELEMENTS = 100, 184, 32, 512
NEUPIMS_TOKENS = (512, 1024, 2048)
ATTACC_CHANNELS, ATTACC_BANKS_OF_A_KEY = 16, 4
NEVER = 1 << 30


@dataclass(frozen=True, kw_only=True)
class TimedProduct:
    """One product of a decode step, with its layout, programs and time.

    Attributes
    ----------
    comp_cycles : int
        Cycles in which the multipliers of the busiest channel work.
    """

    layout: ProductLayout
    step: programs.AttentionProduct
    cycles: int
    comp_cycles: int

    @property
    def utilisation(self) -> float:
        """Share of the time in which the multipliers work."""
        return self.comp_cycles / self.cycles


def fastest_product(
    product: str, attention: Attention, pim: PimSpec, dtype: str, channels: int, profiler: PimProfiler
) -> TimedProduct:
    """The fastest schedule of a product, `KEYS` or `VALUES`, over a full cache.

    Raises
    ------
    UnsupportedOpError, InfeasibleError
        If no layout is possible; see `CacheLayout.check_fit`.
    """
    alternatives = all_schedules(product, attention, pim, dtype, channels)
    products = (
        time_product(layout, schedule.attention_product(layout, attention.keys), profiler)
        for schedule, layout in alternatives
    )
    return min(products, key=lambda timed_product: timed_product.cycles)


def time_product(
    layout: ProductLayout, step: programs.AttentionProduct, profiler: PimProfiler
) -> TimedProduct:
    """Time the programs of `step`."""
    timings = [profiler.time_program(program, layout.pim) for program in step.programs]
    comps = sum(max(commands["COMP"] for commands in timing.channel_commands) for timing in timings)
    return TimedProduct(
        layout=layout,
        step=step,
        cycles=sum(timing.cycles for timing in timings),
        comp_cycles=comps * layout.pim.timing["nCCDS"],
    )


@dataclass(frozen=True, kw_only=True)
class CycleComparison:
    """Cycles of one product here and in a reference."""

    what: str
    reference_cycles: int
    cycles: int

    @property
    def error(self) -> float:
        """Relative error: cycles here over the reference's, less one."""
        return self.cycles / self.reference_cycles - 1


@dataclass(frozen=True, kw_only=True)
class OnDevice:
    """One product of a decode step in its fastest layout.

    Attributes
    ----------
    bound_cycles : float
        Lower bound by row activations (`row_limited_ns`).
    with_bus_cycles : float
        Lower bound with vectors and results on the bus (`decode_limited_ns`).
    busy, busy_of_layer : float
        Share of the time in which multipliers work: packed, and where each vector has rows of its own,
        as those of a fully connected layer of one head have.
    """

    device: str
    what: str
    cycles: int
    bound_cycles: float
    with_bus_cycles: float
    busy: float
    busy_of_layer: float

    @property
    def fraction(self) -> float:
        """The bound of rows over the cycles here."""
        return self.bound_cycles / self.cycles

    @property
    def fraction_with_bus(self) -> float:
        """The bound of rows, vectors and results over the cycles here."""
        return self.with_bus_cycles / self.cycles


def decode(tokens: int, heads: int = 32, kv_heads: int = 0, size: int = 128) -> Attention:
    """A decode step of one request."""
    return Attention(
        batch=1,
        heads=heads,
        kv_heads=kv_heads or heads,
        head_size=size,
        value_size=size,
        queries=1,
        keys=tokens,
        scale=size**-0.5,
    )


def refresh_when_due(pim: PimSpec) -> PimSpec:
    """`pim`, but every refresh is served when it is due, none ahead."""
    return replace(pim, refreshes_ahead=0)


def disable_refresh(pim: PimSpec, accumulators: int = 0) -> PimSpec:
    """`pim`, but without refresh, and with `accumulators` a bank if given."""
    timing = pim.timing | {"nREFI": NEVER}
    return replace(pim, timing=timing, accumulators=accumulators or pim.accumulators)


def aim_attention() -> Iterator[CycleComparison]:
    """Compare the products of 32 heads of 128 with `AIM_ATTENTION`."""
    for product, tokens, accumulators, reference in AIM_ATTENTION:
        pim = disable_refresh(PimSpec.load("aim-gddr6"), accumulators)
        kind = KEYS if product == "QK^T" else VALUES
        run = fastest_product(kind, decode(tokens), pim, "fp16", AIM_CHANNELS, STRICT)
        label = f"{product}, {tokens} tokens, accumulators: {accumulators}"
        yield CycleComparison(what=label, reference_cycles=reference, cycles=run.cycles)


def aim_weights(products: Sequence[tuple[int, ...]] = AIM_WEIGHTS) -> Iterator[CycleComparison]:
    """Compare products with weights with `AIM_WEIGHTS`."""
    for inputs, outputs, channels, accumulators, reference in products:
        pim = disable_refresh(PimSpec.load("aim-gddr6"), accumulators)
        cycles, _ = _layer_timing(inputs, outputs, pim, channels)
        label = f"{inputs} x {outputs}, channels: {channels}, accumulators: {accumulators}"
        yield CycleComparison(what=label, reference_cycles=reference, cycles=cycles)


def neupims() -> Iterator[CycleComparison]:
    """Compare 8 heads of 128 on `newton-hbm2` with NeuPIMs' formula.

    Two pseudo channels of `newton-hbm2` have as many banks (32) as one channel of NeuPIMs.
    """
    pim = disable_refresh(PimSpec.load("newton-hbm2"))
    channels = NEUPIMS_BANKS // pim.banks
    for tokens in NEUPIMS_TOKENS:
        attention = decode(tokens, heads=8)
        row_elements, rounds = NEUPIMS_ELEMENTS, -(-tokens // NEUPIMS_BANKS)
        keys = -(-attention.heads * attention.head_size // row_elements) * (
            NEUPIMS_GWRITE + rounds * NEUPIMS_ROW
        )
        tiles = -(-attention.value_size // NEUPIMS_BANKS)
        values = attention.heads * -(-tokens // row_elements) * (NEUPIMS_GWRITE + tiles * NEUPIMS_ROW)
        for product, reference, kind in (("QK^T", keys, KEYS), ("SV", values, VALUES)):
            run = fastest_product(kind, attention, pim, "fp16", channels, STRICT)
            yield CycleComparison(
                what=f"{product}, {tokens} tokens", reference_cycles=reference, cycles=run.cycles
            )


def attacc_runs(path: str | os.PathLike[str]) -> list[dict[str, str]]:
    """Runs of AttAcc's file with PIM at the banks.

    Those with 130 heads are left out: the file has two different cycle counts for each.
    """
    with open(path, encoding="utf-8", newline="") as file:
        return [r for r in csv.DictReader(file) if r["pim_type"] == "BA" and r["nhead"] != "130"]


def attacc(run: dict[str, str]) -> CycleComparison:
    """Compare both products of one run of AttAcc, a head on one channel as in its mapping.

    That mapping spreads a head over four banks in whole columns, so head sizes are rounded up to these.
    """
    limited, dtype = run["power_constraint"] == "True", {"1": "int8", "2": "fp16"}[run["dbyte"]]
    pim = refresh_when_due(PimSpec.load("attacc-hbm3"))
    if not limited:
        pim = replace(pim, name="attacc-hbm3 without power limit", timing=pim.timing | {"nCCDS": 4})
    step = ATTACC_BANKS_OF_A_KEY * pim.elements_per_column(dtype)
    size = -(-int(run["dhead"]) // step) * step
    attention = decode(int(run["L"]), heads=int(run["nhead"]), size=size)
    layout_fields: dict[str, Any] = {
        "attention": attention,
        "pim": pim,
        "dtype": dtype,
        "channels": ATTACC_CHANNELS,
    }
    keys, values = KeyLayout(spread=1, **layout_fields), ValueLayout(spread=1, **layout_fields)
    accumulated = [False, True][: 1 + programs.can_accumulate(values)]
    cycles = time_product(keys, programs.scores(keys, attention.keys), STRICT).cycles
    cycles += min(
        time_product(values, programs.mix(values, attention.keys, accumulate=accumulate), STRICT).cycles
        for accumulate in accumulated
    )
    label = f"{run['nhead']} heads of {run['dhead']}, {run['L']} tokens, {dtype}"
    return CycleComparison(what=label, reference_cycles=int(run["cycle"]), cycles=cycles)


def error_summary(comparisons: list[CycleComparison]) -> tuple[float, float]:
    """Median and maximum of the absolute errors."""
    errors = [abs(comparison.error) for comparison in comparisons]
    return statistics.median(errors), max(errors)


def device_products(
    devices: list[PimSpec], tokens: int = 2048, channels: int = 16, kv_heads: tuple[int, ...] = (32, 8)
) -> Iterator[OnDevice]:
    """Products of 32 query heads of 128 on each device, for each number of KV heads; refreshes when due."""
    for pim in map(refresh_when_due, devices):
        _, layer_busy = _layer_timing(128, tokens, pim, 1)
        for heads in kv_heads:
            attention = decode(tokens, kv_heads=heads)
            cache_bytes = attention.cache_elements // 2 * ELEMENT_BYTES["fp16"]
            bound = row_limited_ns(cache_bytes, attention.group, pim, channels) / pim.tCK_ns
            scores, mixed = attention.heads * tokens, attention.heads * attention.value_size
            for product, kind, results, vectors in (
                ("QK^T", KEYS, scores, attention.heads * attention.head_size),
                ("SV", VALUES, mixed, scores),
            ):
                run = fastest_product(kind, attention, pim, "fp16", channels, STRICT)
                vector_bytes, lanes = vectors * ELEMENT_BYTES["fp16"], run.layout.lanes
                with_bus = decode_limited_ns(attention, results, vector_bytes, pim, channels, lanes)
                yield OnDevice(
                    device=pim.name,
                    what=f"{product}, KV heads: {heads}",
                    cycles=run.cycles,
                    bound_cycles=bound,
                    with_bus_cycles=with_bus / pim.tCK_ns,
                    busy=run.utilisation,
                    busy_of_layer=layer_busy,
                )


def decode_limited_ns(
    attention: Attention,
    results: float,
    vector_bytes: float,
    pim: PimSpec,
    channels: int,
    lanes: int = 1,
) -> float:
    """As `row_limited_ns` for a product of attention, with transfers of vectors and results.

    It is a lower bound where banks wait for the bus. A bank holds as many results as the device has
    accumulators, then they are read. A row change during a read takes a precharge and an activation. If
    bus and banks can work at the same time, it is the longer of their times.

    With one global buffer, an open row is used with one vector. So each further use of a row needs to open
    the row again or to write the vector again, whichever is shorter.

    Parameters
    ----------
    vector_bytes : float
        Bytes that are written to the buffers of all channels.
    lanes : int
        Lanes of a bank that compute separate products, or 1. With lanes, a buffer is written every few
        columns.
    """
    n, uses, row_bytes = pim.timing, attention.group, attention.cache_elements // 2 * ELEMENT_BYTES["fp16"]

    def burst_gap(kind: str) -> int:
        """Cycles between two such commands on the bus."""
        rules = (rule for rule in pim.constraints if kind in rule.before and kind in rule.after)
        return max(n[rule.latency] for rule in rules if rule.level == "channel")

    rows = row_bytes / (channels * pim.banks * pim.columns_per_row * pim.column_bytes)
    reads = results / (channels * pim.banks)
    write_cycles = vector_bytes / (channels * pim.column_bytes) * n["nBL"]
    row_cycles = row_limited_ns(row_bytes, uses, pim, channels) / pim.tCK_ns
    mode_change, _ = mode_changes(pim, ("channel", "buffer"))
    if pim.global_buffers == 1:
        columns, burst = pim.vector_columns(lanes), burst_gap("GWRITE")
        extra_uses = (uses - 1) * rows
        use_cycles = pim.row_switch_cycles - (n["nRTP"] - n["nCCDS"]) * (mode_change > 0)
        if lanes > 1:
            extra_uses, use_cycles = uses * rows * (pim.columns_per_row // columns) - rows, burst
        row_cycles += max(0.0, extra_uses) * min(use_cycles, columns * burst) / (1 - pim.refresh_share)
    read_cycles = max(n["nBL"] * pim.result_lanes, burst_gap("READRES"), n.get("nHOST", 0))
    if not mode_change:
        return max(row_cycles, write_cycles + reads * read_cycles) * pim.tCK_ns
    runs = reads / (pim.global_buffers * pim.accumulators)
    waiting = (
        runs * mode_change + (reads - runs) * read_cycles + write_cycles - rows * (n["nRTP"] - n["nCCDS"])
    )
    return (row_cycles + max(0.0, waiting) / (1 - pim.refresh_share)) * pim.tCK_ns


def _layer_timing(inputs: int, outputs: int, pim: PimSpec, channels: int) -> tuple[int, float]:
    """Cycles of a fully connected layer in its fastest loop order, and how busy multipliers are."""
    geometry = ConvGeometry(n=1, h=1, w=1, c=inputs, oc=outputs)
    reports = [
        STRICT.time_program(
            lower(ProgramRequest("fc", geometry, schedule), pim, dtype="fp16", channels=channels),
            pim,
        )
        for schedule in schedules(geometry, pim, "fp16")
    ]
    best = min(reports, key=lambda report: report.cycles)
    return best.cycles, best.utilisation
