"""Verification: run a build and compare its results with references that share no code with it."""

from __future__ import annotations

import contextlib
import re
from collections import Counter
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from pimflow.compiler.attention_checks import AttentionChecks
from pimflow.compiler.build import Build
from pimflow.compiler.conditioning import OutputReference, output_checks
from pimflow.compiler.region_check import RESULT_RANGES, STORAGE_TYPES, ReferenceSums, RegionCheck
from pimflow.core.kernel import ConvGeometry
from pimflow.core.output_error import OUTPUT_BOUND, OutputCheck, max_error_check
from pimflow.core.program import PimProgram
from pimflow.core.region_graph import RegionGraph
from pimflow.core.split import WHOLE
from pimflow.core.stages import whole_name
from pimflow.errors import VerificationError
from pimflow.frontend import Network
from pimflow.frontend.reference import Fp16Storage
from pimflow.hardware import System
from pimflow.host.blas_threads import limit_threads
from pimflow.pim_backend.programs.schedule import BankTiling
from pimflow.pim_backend.runtime import codegen, targets
from pimflow.relay_passes.regions.extract_regions import biases, filters
from pimflow.simulators.pim.coverage import program_coverage
from pimflow.simulators.pim.legality import program_violations_by_rule

CHECKED_TIMING = "strict"  # the only timing that issues commands legally, and so can be checked
_BLOCK_ELEMENTS = 1 << 21  # elements of filters in one check: 16 MiB in double precision


@dataclass(frozen=True, kw_only=True)
class Verification:
    """Result of a verification run.

    Attributes
    ----------
    regions : tuple of RegionCheck
        Checks of all PIM regions, on the inputs that they got in the run.
    violations_by_rule : dict of str to int, or None
        Commands of timing `CHECKED_TIMING` that the independent checker found to be illegal; None where the
        system has the published timing, which is not legal. External simulators do not report the clocks of
        commands; then, too, this is of timing `CHECKED_TIMING`.
    inexact : dict of str to str
        PIM regions whose commands do not form every product of the layer exactly once, and what they form.
    samples : int
        Samples of inputs that the build was run on; what stands above is of the one with the largest error.
    """

    regions: tuple[RegionCheck, ...]
    outputs: tuple[OutputCheck, ...]
    violations_by_rule: dict[str, int] | None
    inexact: dict[str, str] = field(default_factory=dict)
    samples: int = 1

    @property
    def worst(self) -> OutputCheck:
        """The output whose error is nearest to its bound."""
        return max_error_check(self.outputs)

    @property
    def timing_violations(self) -> int | None:
        """Violations of all rules together."""
        return None if self.violations_by_rule is None else sum(self.violations_by_rule.values())

    @property
    def max_relative_error(self) -> float:
        """Relative error of the `worst` output."""
        return self.worst.relative_error

    @property
    def bound(self) -> float:
        """Bound of the `worst` output."""
        return self.worst.bound

    def wider_bounds(self, dtype: str) -> tuple[float, ...]:
        """The bounds of all outputs if one is wider than `OUTPUT_BOUND`, else an empty tuple."""
        bounds = tuple(output.bound for output in self.outputs)
        return bounds if max(bounds) > OUTPUT_BOUND[dtype] else ()

    @property
    def is_verified(self) -> bool:
        """Whether all PIM regions and outputs match their references."""
        return self.worst.matches and all(r.matches for r in self.regions)

    @property
    def is_in_range(self) -> bool:
        """Whether the values of all PIM regions are in the range of what stores them."""
        return all(r.in_range for r in self.regions)

    def require(self) -> None:
        """Raise `VerificationError`, which names what differs, unless `is_verified` and free of
        violations.
        """
        wrong = [r.region for r in self.regions if not r.matches]
        out_of_range = [r.region for r in self.regions if not r.in_range]
        if out_of_range:
            others = f"; so have {len(out_of_range) - 1} other layers" if len(out_of_range) > 1 else ""
            raise VerificationError(f"{beyond_fp16(out_of_range[0])}{others}")
        if wrong:
            raise VerificationError(f"PIM region '{wrong[0]}' differs from its reference ({len(wrong)} do)")
        self.worst.require_match("every PIM region matches its own reference, but outputs")
        if self.timing_violations:
            raise VerificationError(f"{self.timing_violations} PIM commands were issued illegally")
        for region, products in self.inexact.items():
            raise VerificationError(f"the commands of PIM region '{region}': {products}")


def beyond_fp16(layer: str) -> str:
    """The message about a layer on PIM whose values are too large for fp16."""
    return (
        f"layer '{layer}' on PIM has values beyond fp16, above 65504: compile with --dtype fp32, scale the "
        "inputs or weights, or give inputs that it is made for (--input)"
    )


def leaves_fp16(operands: Sequence[np.ndarray], y: np.ndarray) -> bool:
    """Whether finite operands of a PIM region, or their result, are infinite as fp16."""
    values = [x for x in operands if x.dtype.kind == "f"]
    if not all(np.isfinite(x).all() for x in values):
        return False
    with np.errstate(over="ignore"):
        return not all(np.isfinite(x.astype(np.float16)).all() for x in (*values, y))


@contextlib.contextmanager
def require_fp16_range(layer: Callable[[str], str]) -> Iterator[None]:
    """Raise `VerificationError` at the end of the block if values of a PIM region left fp16 in it.

    Parameters
    ----------
    layer : callable
        The layer that a function of the runtime computes (`layer_of_symbol`); empty if none stores fp16.
    """
    overflows: list[str] = []

    def check(symbol: str, operands: list[np.ndarray], y: np.ndarray) -> None:
        """Note the first region whose values are too large; the runtime calls this."""
        if not overflows and leaves_fp16(operands, y):
            overflows.append(symbol)

    with codegen.observe_regions(check):
        yield
    name = layer(overflows[0]) if overflows else ""
    if name:
        raise VerificationError(beyond_fp16(name))


def layer_of_symbol(symbol: str, graph: RegionGraph) -> str:
    """The layer that a function of the runtime computes: the longest name that it begins with."""

    def plain(name: str) -> str:
        return re.sub(r"\W", "_", name)

    variable = symbol.removeprefix("pim_")
    names = [region.name for region in graph.regions if variable.startswith(plain(region.name))]
    return max(names, key=len, default=variable)


def nan_count(outputs: Sequence[np.ndarray]) -> int:
    """Number of elements that are NaN."""
    return sum(int(np.isnan(y.astype(np.float64)).sum()) for y in outputs if y.dtype.kind not in "biu")


def is_constant(outputs: Sequence[np.ndarray]) -> bool:
    """Whether every output holds one number, up to rounding in fp32; a single number tells nothing."""
    for y in outputs:
        values = y.astype(np.float64)
        if y.size < 2 or not np.isfinite(values).all():
            return False
        if np.ptp(values) > 1e-6 * np.abs(values).max():
            return False
    return bool(outputs)


def require_finite(expected: Sequence[np.ndarray]) -> None:
    """Raise `VerificationError` if a reference has no finite element, with which nothing can be compared."""
    for index, reference in enumerate(expected):
        if reference.size and not np.isfinite(reference).any():
            raise VerificationError(
                f"output {index} of the reference is NaN or infinity everywhere, so nothing can be verified; "
                "look for such values in the weights and the inputs"
            )


@dataclass(frozen=True, kw_only=True)
class BuildObservation:
    """A run of a build, with checked PIM regions and commands; its outputs are not compared yet."""

    inputs: Mapping[str, np.ndarray]
    outputs: Sequence[np.ndarray]
    stored: Fp16Storage
    dtype: str
    regions: tuple[RegionCheck, ...]
    violations_by_rule: dict[str, int] | None
    inexact: dict[str, str]

    def verify_outputs(self, reference: OutputReference) -> Verification:
        """Compare the outputs by `output_checks`; this no longer needs the network."""
        return Verification(
            regions=self.regions,
            outputs=output_checks(reference, self.stored, self.dtype, self.inputs, self.outputs),
            violations_by_rule=self.violations_by_rule,
            inexact=self.inexact,
        )


def verify(
    network: Network,
    built: Build,
    system: System,
    inputs: Mapping[str, np.ndarray],
    expected: Sequence[np.ndarray],
    tolerance: float | None = None,
) -> Verification:
    """Run a build and check every PIM region, the outputs, and the legality and products of the commands.

    Parameters
    ----------
    network : Network
        Gives the filters, and the reference with random roundings.
    inputs : mapping of str to ndarray
        In the network's order and dtypes.
    expected : sequence of ndarray
        Outputs of the network's reference, in fp32.
    tolerance : float, optional
        Bound on the error of every output, instead of that of `conditioning`.
    """
    reference = OutputReference(
        expected=expected, perturbed=network.perturbed, tolerance=tolerance, rounded=network.rounded_outputs
    )
    return observe(network, built, system, inputs).verify_outputs(reference)


def observe(
    network: Network, built: Build, system: System, inputs: Mapping[str, np.ndarray]
) -> BuildObservation:
    """Run a build and check everything but its outputs; parameters as in `verify`."""
    programs, weights, bias = built.programs, filters(network.module), biases(network.module)
    checks: list[RegionCheck] = []

    attention = AttentionChecks(built.products, built.states, inputs)

    def check(symbol: str, operands: list[np.ndarray], y: np.ndarray) -> None:
        """Check a call of a PIM program; the runtime calls this."""
        if symbol in built.products:
            checks.extend(attention.check_call(symbol, operands, y))
            return
        program, (x, initial, *added) = programs[symbol], operands
        region = whole_name(program.region, weights)
        split = built.splits.get(region, WHOLE)
        # A tensor is an operand of the region; a bias is taken from the network, not from the module.
        start = {"": None, "bias": bias.get(region), "add": initial}[program.initial]
        g = program.geometry
        pim_filters = split.pim_filters(weights[region], g.kh * g.kw)
        checks.append(check_region(program, pim_filters, x, y, start, *added))

    with codegen.observe_regions(check):
        outputs = built.infer(inputs)
    missing = {p.region for p in programs.values()} - {c.region for c in checks}
    checks += [RegionCheck(region=name, error_over_bound=float("inf")) for name in sorted(missing)]
    checked_programs = [*programs.values(), *attention.shorter_programs()]
    violations: Counter[str] | None = None
    if system.timing == CHECKED_TIMING:
        violations = Counter()
        for program in checked_programs:
            violations.update(program_violations_by_rule(program, system.pim))
    return BuildObservation(
        inputs=inputs,
        outputs=outputs,
        stored=fp16_storage(built, system, weights),
        dtype=system.dtype,
        regions=tuple(checks),
        violations_by_rule=None if violations is None else dict(violations),
        inexact=inexact_products(checked_programs),
    )


def inexact_products(programs: Iterable[PimProgram]) -> dict[str, str]:
    """By region, products of programs that do not form every product of their layer exactly once.

    For programs that only store: elements of a token that are not stored exactly once.
    """
    products_by_region = ((program.region, program_coverage(program)) for program in programs)
    return {
        region: str(products) for region, products in products_by_region if products and not products.exact
    }


def fp16_storage(built: Build, system: System, layer_names: Container[str]) -> Fp16Storage:
    """Tensors that a build stores in fp16: those of PIM, and, on a real GPU, those between kernels.

    A layer that is split counts as a whole. `layer_names` has the names of layers, at least of those with
    weights.
    """
    if system.dtype != "fp16":
        return Fp16Storage()
    gpu = "gpu" in list(targets.target_by_name(built.target).keys)
    return Fp16Storage(
        layers=frozenset(whole_name(p.region, layer_names) for p in built.programs.values()), kernels=gpu
    )


def check_region(
    program: PimProgram,
    filters: np.ndarray,
    x: np.ndarray,
    y: np.ndarray,
    initial: np.ndarray | None = None,
    added: np.ndarray | None = None,
) -> RegionCheck:
    """Compare a region's result with products of its rounded operands, summed in double precision.

    The bound of an element is gamma_K * sum |x*w| for K fp32 additions in any order, and half a unit in the
    last place of the storage type for each rounding: one, or, where sums are resumed, one for each part.
    The `initial` value of sums, [oc] or of the shape of the result, counts as one more product. `added`, of
    the shape of the result, is handled as further channels of the operand with an identity matrix as
    filters. No activation of `RESULT_RANGES` increases a difference, so its result has the bound of the sum.
    """
    g = program.geometry
    if added is not None:
        pairs = [x.reshape(g.pixels, -1), added.reshape(g.pixels, g.oc)]
        x, filters = np.hstack(pairs), np.hstack([filters, np.eye(g.oc, dtype=filters.dtype)])
    pixels = slice(program.pixel_begin, program.pixel_end)
    results = y.reshape(-1, g.oc)
    start = None if initial is None else np.broadcast_to(initial.reshape(-1, g.oc), (g.pixels, g.oc))
    rows = max(1, _BLOCK_ELEMENTS // g.reduction) if g.groups == 1 else g.oc
    max_error = 0.0
    for begin in range(0, g.oc, rows):
        part = slice(begin, min(begin + rows, g.oc))
        with limit_threads(g.pixels * (part.stop - begin) * g.reduction):
            sums = _reference_sums(program, filters[part], x, None if start is None else start[pixels, part])
        if sums is None:
            return RegionCheck(region=program.region, error_over_bound=float("inf"), in_range=False)
        max_error = max(max_error, sums.error_over_bound(results[:, part]))
    return RegionCheck(region=program.region, error_over_bound=max_error)


def _reference_sums(
    program: PimProgram, filters: np.ndarray, x: np.ndarray, initial: np.ndarray | None
) -> ReferenceSums | None:
    """The reference of a region in the channels of `filters`; None for values outside the range of its type.

    Where sums are resumed they are rounded after each part of the reduction; the activation follows the last.
    """
    # Integers are products of whole numbers and their scales, whose sums are exact before these are applied.
    dtype = "fp32" if program.dtype == "int8" else program.dtype
    g, rounding = replace(program.geometry, oc=len(filters)), STORAGE_TYPES[dtype]
    pixels, tiling = slice(program.pixel_begin, program.pixel_end), BankTiling.from_program(program)
    step = tiling.columns * tiling.elements_per_column if program.resumes else g.reduction
    with np.errstate(over="ignore"):
        x64 = x.reshape(g.n, g.h, g.w, g.c).astype(rounding).astype(np.float64)
        w64 = filters.astype(rounding).astype(np.float64)
    if not (np.isfinite(x64).all() and np.isfinite(w64).all()):
        return None
    magnitude = convolve(np.abs(x64), np.abs(w64), g)[pixels]
    expected, partial = np.zeros_like(magnitude), np.zeros_like(magnitude)
    if initial is not None:
        with np.errstate(over="ignore"):
            start = initial.astype(rounding).astype(np.float64)
        expected, magnitude = expected + start, magnitude + np.abs(start)
    parts = range(0, g.reduction, step)
    for begin in parts:
        expected += convolve(x64, w64, g, range(begin, begin + step))[pixels]
        partial += np.abs(expected)
        if not np.abs(expected).max() < np.finfo(rounding).max:
            return None
    return ReferenceSums(
        dtype=dtype,
        expected=np.clip(expected, *RESULT_RANGES[program.activation]),
        magnitude=magnitude,
        products=g.reduction + (initial is not None),
        partial=partial,
        roundings=len(parts),
    )


def convolve(
    x: np.ndarray, filters: np.ndarray, g: ConvGeometry, elements: range | None = None
) -> np.ndarray:
    """Convolution, tap by tap.

    Parameters
    ----------
    x : ndarray, [n, h, w, c]
    filters : ndarray, [oc, kh*kw*c/groups]
    elements : range, optional
        Elements of the reduction to sum; all by default.

    Returns
    -------
    ndarray, [n*oh*ow, oc]
    """
    pad_top, pad_left, pad_bottom, pad_right = g.padding
    padded = np.pad(x, ((0, 0), (pad_top, pad_bottom), (pad_left, pad_right), (0, 0)))
    channels = g.c // g.groups
    taps = filters.reshape(g.groups, g.oc // g.groups, g.kh, g.kw, channels)
    out = np.zeros((g.groups, g.n * g.oh * g.ow, g.oc // g.groups))
    for i in range(g.kh):
        for j in range(g.kw):
            begin, end = 0, channels
            if elements is not None:
                before = (i * g.kw + j) * channels
                begin, end = max(0, elements.start - before), min(channels, elements.stop - before)
            if begin >= end:
                continue
            y, z = i * g.dilation[0], j * g.dilation[1]
            part = padded[
                :,
                y : y + (g.oh - 1) * g.stride[0] + 1 : g.stride[0],
                z : z + (g.ow - 1) * g.stride[1] + 1 : g.stride[1],
            ]
            vectors = part.reshape(-1, g.groups, channels)[..., begin:end].swapaxes(0, 1)
            out += vectors @ taps[:, :, i, j, begin:end].swapaxes(1, 2)
    return out.swapaxes(0, 1).reshape(-1, g.oc)
