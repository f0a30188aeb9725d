"""GEMVs with narrow operands on two published designs, under their conventions.

- Samsung LPDDR5X-PIM, by its tech note "LP5X-PIM Sim" (arXiv 2606.00636): a package of four channels, beside
  an ideal sequential read of the weights over the same four.
- Scales in the unit of HBM-PIM (IEEE CAL 24(1) 2025, doi 10.1109/LCA.2025.3532682): weights of 4 bits in
  groups of 128, beside fp16, and beside dequantisation by the instructions that HBM-PIM has.
- P3-LLM (ISCA 2026, arXiv 2511.06838): W4A8KV4 on HBM-PIM whose units have 64 multipliers, beside fp16.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from pimflow.core.attention import Attention
from pimflow.core.kernel import ConvGeometry
from pimflow.hardware import PimSpec
from pimflow.hardware.operands import Operand
from pimflow.pim_backend.programs.cache_schedule import KEYS, VALUES
from pimflow.placement.costs.attention_runs import CacheWork
from pimflow.placement.costs.pim_runs import LayerPimCost, PimTarget
from pimflow.simulators.profiler import BuiltIn

SIZES = (4096, 8192)  # inputs and outputs; the abstract does not give those of the note
SHORT_INPUTS = 2048  # half a row of int4: the note reshapes shorter matrices, pimflow does not
FENCE_NS = 150.0  # LP5X-PIM Sim
PACKAGE_CHANNELS = 4
GROUP = 128
STACK_CHANNELS = 16  # pseudo channels of the simulator of HBM-PIM
CAL_LAYERS = ((4096, 4096), (4096, 11008), (11008, 4096))  # inputs, outputs of Llama-2-7B


@dataclass(frozen=True, kw_only=True)
class PublishedSpeedup:
    """Speed-ups of GEMVs over an ideal read, as the note's abstract gives them.

    Attributes
    ----------
    name : str
    operands : tuple of (str, str)
        Types of weights and activations that it speaks of.
    low, high : float
        The range; equal for a single figure.
    fenced : bool
        Whether a fence between phases is charged.
    """

    name: str
    operands: tuple[tuple[str, str], ...]
    low: float
    high: float
    fenced: bool = False


PUBLISHED = (
    PublishedSpeedup(name="W8A8", operands=(("int8", "int8"),), low=6.0, high=6.2),
    PublishedSpeedup(name="W4A4", operands=(("int4", "int4"),), low=6.0, high=6.2),
    PublishedSpeedup(name="FP W8A8", operands=(("fp8", "fp8"),), low=6.0, high=6.2),
    PublishedSpeedup(name="A16", operands=(("int8", "fp16"), ("int4", "fp16")), low=5.7, high=5.8),
    PublishedSpeedup(name="W8A8, fences", operands=(("int8", "int8"),), low=5.0, high=5.0, fenced=True),
    PublishedSpeedup(
        name="lowest with fences, W4A16", operands=(("int4", "fp16"),), low=4.1, high=4.1, fenced=True
    ),
)


@dataclass(frozen=True, kw_only=True)
class Gemv:
    """A product of a matrix with one vector on PIM, and an ideal read of the matrix over the same bus.

    Attributes
    ----------
    time_ns : float
        On PIM, with every refresh that falls due.
    read_ns : float
        Bytes of the values of the matrix over the peak bandwidth of the channels.
    result_reads : int
        READRESs of a channel.
    vector_writes : int
        GWRITEs of a channel.
    """

    time_ns: float
    read_ns: float
    result_reads: int
    vector_writes: int

    def speedup(self, fences: int = 0) -> float:
        """Over the read, with so many fences."""
        return self.read_ns / (self.time_ns + fences * FENCE_NS)


def gemv_cost(
    pim: PimSpec, channels: int, geometry: ConvGeometry, dtype: str = "fp16"
) -> tuple[LayerPimCost, PimTarget]:
    """The fastest program of a GEMV; no refresh comes before it."""
    target = PimTarget(
        pim=replace(pim, refreshes_ahead=0), channels=channels, dtype=dtype, profiler=BuiltIn()
    )
    return target.whole_layer_costs(geometry, "gemv")[0], target


def matrix_vector(inputs: int, outputs: int, weights: str | None, activations: str | None) -> ConvGeometry:
    """The geometry of a product of a matrix with one vector."""
    return ConvGeometry(n=1, h=1, w=1, c=inputs, oc=outputs, weights=weights, activations=activations)


def package_gemv(pim: PimSpec, inputs: int, outputs: int, weights: str, activations: str) -> Gemv:
    """A GEMV on the four channels of a package of LPDDR5X-PIM."""
    geometry = matrix_vector(inputs, outputs, weights, activations)
    cost, target = gemv_cost(pim, PACKAGE_CHANNELS, geometry)
    operand = pim.operand(weights, activations)
    assert operand is not None
    value_bytes = inputs * outputs * operand.weight_type.bits / 8
    bus_bytes_per_ns = pim.column_bytes / (pim.timing["nBL"] * pim.tCK_ns)
    return Gemv(
        time_ns=cost.time_ns,
        read_ns=value_bytes / (bus_bytes_per_ns * target.channels),
        result_reads=-(-cost.commands["READRES"] // target.channels),
        vector_writes=-(-cost.commands["GWRITE"] // target.channels),
    )


@dataclass(frozen=True, kw_only=True)
class SpeedupComparison:
    """Speed-ups over an ideal read here, beside published ones.

    Attributes
    ----------
    speedups : tuple of float
        Of all sizes and types, over a read without refresh, with a fence for each result where fences count.
    short_speedups : tuple of float
        The same for `SHORT_INPUTS` inputs.
    phase_fences : tuple of float
        The same with a fence only where the program goes from vectors to products and to results; as
        `speedups` where no fences count.
    refresh_share : float
        Share of the time in which the memory refreshes, which an ideal read leaves out.
    """

    published: PublishedSpeedup
    speedups: tuple[float, ...]
    short_speedups: tuple[float, ...]
    phase_fences: tuple[float, ...]
    refresh_share: float

    @property
    def error(self) -> float:
        """Relative difference of the middles of both ranges; of the lowest, where that is published."""
        published = (self.published.low + self.published.high) / 2
        if self.published.name.startswith("lowest"):
            return min(self.speedups) / published - 1
        return (min(self.speedups) + max(self.speedups)) / 2 / published - 1


def speedup_comparisons(
    pim: PimSpec, sizes: tuple[int, ...] = SIZES, published: tuple[PublishedSpeedup, ...] = PUBLISHED
) -> Iterator[SpeedupComparison]:
    """LPDDR5X-PIM beside the note, by types."""

    def gemvs(row: PublishedSpeedup, inputs: tuple[int, ...]) -> list[Gemv]:
        """The products of a row, by types, inputs and outputs."""
        shapes = [(count, outputs) for count in inputs for outputs in sizes]
        return [package_gemv(pim, *shape, *operand) for operand in row.operands for shape in shapes]

    for row in published:
        long, short = gemvs(row, sizes), gemvs(row, (SHORT_INPUTS,))
        yield SpeedupComparison(
            published=row,
            speedups=tuple(gemv.speedup(gemv.result_reads * row.fenced) for gemv in long),
            short_speedups=tuple(gemv.speedup(gemv.result_reads * row.fenced) for gemv in short),
            phase_fences=tuple(gemv.speedup(2 * gemv.vector_writes * row.fenced) for gemv in long),
            refresh_share=pim.refresh_share,
        )


@dataclass(frozen=True, kw_only=True)
class GroupScales:
    """Times of a GEMV on HBM-PIM: fp16, and weights of 4 bits in groups.

    Attributes
    ----------
    in_unit_ns : float
        By the device's file: scales come from the open row into registers, and cost no instruction.
    instruction_ns : float
        An instruction of the units: a MAC, or a multiplication by a scale.
    comps : int
        MACs of a channel.
    """

    inputs: int
    outputs: int
    fp16_ns: float
    in_unit_ns: float
    instruction_ns: float
    comps: int
    group_comps: int

    @property
    def cascade_ns(self) -> float:
        """With one instruction for each group of an output, which multiplies its sum by the scale."""
        return self.in_unit_ns + self.comps / self.group_comps * self.instruction_ns

    @property
    def plain_ns(self) -> float:
        """With one instruction before each MAC, which multiplies the weights by their scales."""
        return self.in_unit_ns + self.comps * self.instruction_ns


def group_scales(pim: PimSpec, layers: tuple[tuple[int, int], ...] = CAL_LAYERS) -> Iterator[GroupScales]:
    """Times of some GEMVs on a stack of HBM-PIM."""
    for inputs, outputs in layers:
        wide, _ = gemv_cost(pim, STACK_CHANNELS, matrix_vector(inputs, outputs, None, None))
        narrow, target = gemv_cost(pim, STACK_CHANNELS, matrix_vector(inputs, outputs, "int4_g128", None))
        yield GroupScales(
            inputs=inputs,
            outputs=outputs,
            fp16_ns=wide.time_ns,
            in_unit_ns=narrow.time_ns,
            instruction_ns=pim.timing["nCCDS"] * pim.tCK_ns,
            comps=-(-narrow.commands["COMP"] // target.channels),
            group_comps=GROUP // pim.with_weights("int4_g128", "fp16").elements_per_column("fp16"),
        )


P3_CONTEXT = 4096  # tokens; the abstract gives an average over decoding
P3_PUBLISHED = 4.9  # over HBM-PIM
P3_MULTIPLIERS = 64  # a unit: 16 processing elements of 4
P3_COLUMN_CYCLES = 2  # at 500 MHz, of a clock of 1 GHz; 4 on HBM-PIM
# Llama-2-7B: products of a block, by inputs and outputs, and how many there are.
P3_LAYERS = {(4096, 4096): 4, (4096, 11008): 2, (11008, 4096): 1}
P3_ATTENTION = Attention(
    batch=1,
    heads=32,
    kv_heads=32,
    head_size=128,
    value_size=128,
    queries=1,
    keys=P3_CONTEXT,
    scale=1.0,
    positioned=True,
)


@dataclass(frozen=True, kw_only=True)
class BlockTimes:
    """Times of the products of a block of Llama-2-7B on a stack of HBM-PIM, one after the other.

    Attributes
    ----------
    name : str
        What the units multiply.
    weights_ns, attention_ns : float
        Of all products with weights, and of both with the cache.
    comps_ns, vectors_ns : float
        Of COMPs back to back, and of the bursts of vectors, of the products with weights.
    """

    name: str
    weights_ns: float
    attention_ns: float
    comps_ns: float
    vectors_ns: float

    @property
    def block_ns(self) -> float:
        """All of them."""
        return self.weights_ns + self.attention_ns


def p3_times(pim: PimSpec) -> Iterator[BlockTimes]:
    """HBM-PIM with fp16, then with integers of 4 bits, term by term as P3-LLM has them.

    Scales are outside the units, and its groups of 128 are one scale an output here.
    """
    yield _block_times("fp16", pim)
    fast = replace(pim, timing={**pim.timing, "nCCDS": P3_COLUMN_CYCLES})
    steps = (
        (pim, "W4A16KV4, 16 multipliers", 16, "fp16"),
        (pim, f"W4A16KV4, {P3_MULTIPLIERS} multipliers", P3_MULTIPLIERS, "fp16"),
        (pim, f"W4A8KV4, {P3_MULTIPLIERS} multipliers", P3_MULTIPLIERS, "fp8"),
        (fast, "the same at 500 MHz", P3_MULTIPLIERS, "fp8"),
    )
    for device, name, multiplications, activations in steps:
        operand = Operand(
            weights="int4",
            activations=activations,
            multiplications=multiplications,
            accumulator="fp32",
            scales="result",
        )
        yield _block_times(name, replace(device, operands=(operand,)), activations)


def _block_times(name: str, pim: PimSpec, activations: str = "") -> BlockTimes:
    """The times on a device with one operand of `activations`, or with none."""
    weights, vectors = ("int4", activations) if activations else (None, None)
    layers = [
        (count, gemv_cost(pim, STACK_CHANNELS, matrix_vector(*shape, weights, vectors))[0])
        for shape, count in P3_LAYERS.items()
    ]
    cycles = {
        "nCCDS": sum(count * cost.commands["COMP"] for count, cost in layers) / STACK_CHANNELS,
        "nBL": sum(count * cost.gwrite_bursts for count, cost in layers) / STACK_CHANNELS,
    }
    comps_ns, vectors_ns = (number * pim.timing[key] * pim.tCK_ns for key, number in cycles.items())
    cached = pim.with_weights("plain_int4", activations) if activations else pim
    target = PimTarget(pim=cached, channels=STACK_CHANNELS, dtype="fp16", profiler=BuiltIn())
    works = [CacheWork.from_attention(target, P3_ATTENTION, product) for product in (KEYS, VALUES)]
    return BlockTimes(
        name=name,
        weights_ns=sum(count * cost.time_ns for count, cost in layers),
        comps_ns=comps_ns,
        vectors_ns=vectors_ns,
        attention_ns=sum(work.costs()[0].total_ns for work in works),
    )
