"""Fits the GPU model's constants to measured kernels, and writes them to the preset's file."""

from __future__ import annotations

import dataclasses
import json
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import numpy as np
from scipy.optimize import least_squares

from calibration.samples import Sample, analytic_ns
from pimflow.errors import SpecError
from pimflow.hardware.gpu import GpuSpec
from pimflow.host.files import replace_file
from pimflow.simulators.gpu.machine import GemmTilings, KernelBatch, RooflineMachine, family, has_rate, tiling
from pimflow.simulators.gpu.roofline import demands, execution_cycles

# constant -> (lower bound, initial value, upper bound): shares of a peak, cycles, bytes per cycle
GPU_CONSTANTS = {
    "sm_port_bytes_per_cycle": (8.0, 32.0, 64.0),
    "l2": (0.1, 0.7, 1.0),
    "dram": (0.4, 0.85, 1.0),
    "dram_write": (0.4, 1.0, 1.2),
    "l2_resident": (0.01, 0.5, 1.0),
    "l2_reuse": (0.05, 0.7, 2.0),
    "reread": (0.01, 0.5, 1.0),
    "overlap": (1.0, 4.0, 8.0),
}
GEMM_CONSTANTS = {
    "mma": (0.3, 0.8, 1.0),
    "tile_half": (0.005, 0.1, 1.0),
    "iteration_cycles": (20.0, 300.0, 3000.0),
    "tile_power": (0.05, 0.5, 2.0),
    "block_cycles": (50.0, 1800.0, 20000.0),
    "kernel_cycles": (1.0, 1.0, 40000.0),
    "split_cycles": (50.0, 1000.0, 100000.0),
}
DEPTHWISE_CONSTANTS = {
    "depthwise": (0.01, 0.5, 1.0),
    "kernel_cycles": (1.0, 700.0, 40000.0),
    "l2": (0.05, 0.7, 1.0),
}
STREAM_CONSTANTS = {"kernel_cycles": (1.0, 700.0, 40000.0)}
KIND_CONSTANTS = {"gemm": GEMM_CONSTANTS, "depthwise": DEPTHWISE_CONSTANTS, "stream": STREAM_CONSTANTS}
EMITTED_CONSTANTS = {
    "sm_port_bytes_per_cycle": GPU_CONSTANTS["sm_port_bytes_per_cycle"],
    "dram_write": GPU_CONSTANTS["dram_write"],
    "dram_write_stream": GPU_CONSTANTS["dram_write"],  # reads and writes alternate all the time
    "overlap": GPU_CONSTANTS["overlap"],
    "overlap_row": GPU_CONSTANTS["overlap"],  # whose warps wait for no barrier
    "kernel_cycles": (1.0, 1000.0, 40000.0),
    "step_cycles": (20.0, 300.0, 3000.0),
    "exposed": (0.1, 0.9, 1.0),
    "channel_spread": (1.0, 3.0, 32.0),
}
# constants that `emitted` does not use
UNUSED_IF_EMITTED = "block_cycles", "tile_half", "tile_power", "split_cycles", "gemv", "depthwise"
WINOGRAD = ("3x3_s1", 2.25)  # family, and how many fewer products F(2x2, 3x3) needs
SPLIT_LIMITS = (1.0, 32.0)
# The error has several minima, which differ in whether large tiles pay off; the fit starts near each.
STARTS: tuple[dict[str, float], ...] = (
    {},
    {"tile_half": 0.01, "tile_power": 0.1},
    {"tile_half": 0.01, "tile_power": 1.5},
)
LAUNCHES_NS = range(0, 50_000, 100)  # launches that `fit_launch` tries
MIN_FAMILY_SAMPLES = 30  # samples from which on a family has its own constants
MAX_ROUNDS = 12
MIN_RELATIVE_GAIN = 0.005  # the fit ends when a round gains less, as a fraction of the loss
HUBER = 0.1  # log error beyond which a sample counts linearly: libraries choose some kernels badly


@dataclasses.dataclass(frozen=True)
class SampleGroup:
    """Samples with the same constants and channels; the tiles of all of them are known, or of none."""

    family: str
    dtype: str
    channels: int | None
    tilings: GemmTilings | None
    samples: tuple[Sample, ...]
    batch: KernelBatch
    log_measured_ns: np.ndarray

    @property
    def kind(self) -> str:
        """Kind of its kernels."""
        return self.samples[0].kind

    def log_errors(self, gpu: GpuSpec) -> np.ndarray:
        """Log error of each sample: log(predicted / measured)."""
        machine = RooflineMachine(gpu, self.dtype, self.channels, self.family)
        cycles = [
            execution_cycles(demand, machine).min(axis=1)
            for demand in demands(self.kind, self.batch, machine, self.tilings)
        ]
        predicted_ns = np.min(cycles, axis=0) / machine.cycles_per_ns + gpu.launch_ns
        log_errors: np.ndarray = np.log(predicted_ns) - self.log_measured_ns
        return log_errors


def sample_groups(samples: Iterable[Sample]) -> list[SampleGroup]:
    """Samples in groups that the model evaluates at once."""
    by_key: dict[tuple[str, str, str, int, bool], list[Sample]] = {}
    for sample in sorted(samples, key=lambda member: member.tile or ()):
        tiled = sample.tile is not None
        key = (family(sample.kernel), sample.dtype, sample.kind, sample.channels or 0, tiled)
        by_key.setdefault(key, []).append(sample)
    return [
        SampleGroup(
            family=name,
            dtype=dtype,
            channels=channels or None,
            tilings=GemmTilings([tiling(member.tile) for member in members if member.tile], by_row=True)
            if tiled
            else None,
            samples=tuple(members),
            batch=KernelBatch([sample.kernel for sample in members]),
            log_measured_ns=np.log([sample.measured_ns for sample in members]),
        )
        for (name, dtype, _, channels, tiled), members in sorted(by_key.items())
    ]


def fit(gpu: GpuSpec, samples: Sequence[Sample]) -> GpuSpec:
    """`gpu` with the constants that fit `samples` best.

    The error is logarithmic and robust. Constants of the GPU (bandwidths, caches) are fitted to all samples,
    those of a family of kernels (latencies, use of the tensor cores, whether the library splits K) to the
    samples of the family, alternately. Constants that are zero stay zero. Those of split-K stay as they are
    if every sample's tile is known and none is split.

    If some samples are kernels that pimflow emits, or `gpu` has ``step_cycles``, the constants of
    `simulators.gpu.emitted` are fitted, which are the same for all families. Of the hand-written kernels that
    Accel-Sim ran, only GEMMs are used then, since pimflow emits none of the others.
    """
    if "step_cycles" in gpu.efficiency or any(sample.emitted for sample in samples):
        model_samples = [
            candidate
            for candidate in samples
            if candidate.emitted or candidate.tile or not candidate.is_simulated
        ]
        return _fit_emitted(gpu, model_samples)
    groups = sample_groups(samples)
    families: dict[tuple[str, str], list[SampleGroup]] = {}
    for member in groups:
        families.setdefault((_constant_suffix(member, groups), member.kind), []).append(member)
    initial = {name: bounds[1] for name, bounds in GPU_CONSTANTS.items()}
    for (suffix, _), members in families.items():
        initial |= {key: bounds[1] for key, bounds in _free_constants(members, suffix).items()}
    zero_constants = {key: 0.0 for key in initial if gpu.efficiency.get(key) == 0}
    gpu = _with_constants(gpu, initial | zero_constants)
    loss = _loss(gpu, groups)
    for _ in range(MAX_ROUNDS):
        before = loss
        gpu = _solve(gpu, groups, GPU_CONSTANTS)
        for (suffix, _), members in families.items():
            gpu = _fit_family(gpu, members, suffix)
        loss = _loss(gpu, groups)
        if loss > before * (1 - MIN_RELATIVE_GAIN):
            break
    return gpu


def _fit_emitted(gpu: GpuSpec, samples: Sequence[Sample]) -> GpuSpec:
    unused = (*UNUSED_IF_EMITTED, "kernel_cycles_")
    remaining = {key: value for key, value in gpu.efficiency.items() if not key.startswith(unused)}
    initial = {name: bounds[1] for name, bounds in EMITTED_CONSTANTS.items()}
    start = dataclasses.replace(gpu, efficiency=remaining | initial)
    return _solve(start, sample_groups(samples), EMITTED_CONSTANTS)


def _constant_suffix(member: SampleGroup, groups: Sequence[SampleGroup]) -> str:
    """Suffix of the names of a group's constants; that of its whole kind if it has few samples."""
    same_family = [
        group
        for group in groups
        if (group.family, group.dtype, group.kind) == (member.family, member.dtype, member.kind)
    ]
    if sum(len(group.samples) for group in same_family) >= MIN_FAMILY_SAMPLES:
        return f"_{member.family}_{member.dtype}"
    return "" if member.kind == "gemm" else f"_{member.kind}"


def _has_unknown_splits(members: Sequence[SampleGroup]) -> bool:
    """Whether the limit up to which the library splits K has to be fitted."""
    return members[0].kind == "gemm" and any(member.tilings is None for member in members)


def _may_split(members: Sequence[SampleGroup]) -> bool:
    """Whether any sample may have split-K."""
    return any(member.tilings is None or member.tilings.extra_splits.any() for member in members)


def _free_constants(members: Sequence[SampleGroup], suffix: str) -> dict[str, tuple[float, float, float]]:
    """The constants of a family, each with lower bound, initial value and upper bound."""
    bounds = dict(KIND_CONSTANTS[members[0].kind])
    if members[0].family == WINOGRAD[0] and suffix:
        bounds["mma"] = (0.3, 0.8, WINOGRAD[1])
    if not _may_split(members):
        bounds.pop("split_cycles", None)
    return {name + suffix: limits for name, limits in bounds.items()}


def _fit_family(gpu: GpuSpec, members: Sequence[SampleGroup], suffix: str) -> GpuSpec:
    free = _free_constants(members, suffix)
    starts = [gpu]
    if members[0].kind == "gemm":
        initial = {key: bounds[1] for key, bounds in free.items()}
        starts += [
            _with_constants(gpu, initial | {name + suffix: value for name, value in overrides.items()})
            for overrides in STARTS
        ]
    if _has_unknown_splits(members):
        starts = [
            _with_constants(start, {f"split_limit{suffix}": limit})
            for start in starts
            for limit in SPLIT_LIMITS
        ]
    return min((_solve(start, members, free) for start in starts), key=lambda fitted: _loss(fitted, members))


def _loss(gpu: GpuSpec, members: Sequence[SampleGroup]) -> float:
    error = np.concatenate([member.log_errors(gpu) for member in members])
    return float(np.sum(np.sqrt(1 + (error / HUBER) ** 2) - 1))


def _with_constants(gpu: GpuSpec, constants: Mapping[str, float]) -> GpuSpec:
    return dataclasses.replace(gpu, efficiency={**gpu.efficiency, **constants})


def _solve(
    gpu: GpuSpec, members: Sequence[SampleGroup], free: Mapping[str, tuple[float, float, float]]
) -> GpuSpec:
    """`gpu` with the constants `free` fitted to `members`, starting from their present values."""
    start = {key: gpu.efficiency[key] for key in free if gpu.efficiency[key] > 0}
    lower, _, upper = np.log(np.array([free[key] for key in start])).T
    initial = np.clip(np.log(list(start.values())), lower + 1e-6, upper - 1e-6)

    def constants(point: np.ndarray) -> dict[str, float]:
        return {key: float(f"{value:.4g}") for key, value in zip(start, np.exp(point))}

    def log_errors(point: np.ndarray) -> np.ndarray:
        """The log error of each sample with the constants at a point."""
        candidate = _with_constants(gpu, dict(zip(start, np.exp(point))))
        return np.concatenate([member.log_errors(candidate) for member in members])

    solution = least_squares(
        log_errors, initial, bounds=(lower, upper), loss="soft_l1", f_scale=HUBER, diff_step=1e-2, max_nfev=60
    )
    return _with_constants(gpu, constants(solution.x))


def fit_launch(gpu: GpuSpec, samples: Sequence[Sample], dtype: str = "fp32") -> GpuSpec:
    """`gpu` with the launch that fits `samples` of one dtype best, and all other constants unchanged.

    Where constants are transferred to another GPU, driver or library, only the launch is fitted. The error is
    the median: in a transfer, some families of kernels are wrong as a whole, and a mean would add their
    errors to the launch of all kernels.
    """
    rows = [sample for sample in samples if sample.dtype == dtype and has_rate(gpu, dtype)]
    if not rows:
        raise SpecError(f"gpu '{gpu.name}': no kernels of '{dtype}' to fit the launch to")
    execution_ns = np.array(analytic_ns(rows, dataclasses.replace(gpu, launch_ns=0.0)))
    measured_ns = np.array([sample.measured_ns for sample in rows])

    def median_ape(launch_ns: float) -> float:
        return float(np.median(np.abs((execution_ns + launch_ns) / measured_ns - 1)))

    return dataclasses.replace(gpu, launch_ns=float(min(LAUNCHES_NS, key=median_ape)))


def _split_text(split: str) -> str:
    return "half of its shapes, by hash" if split == "hash" else "all of it"


def launch_source(samples: Sequence[Sample], data: str, split: str) -> str:
    """Text for the source of a launch that was fitted to `samples`, rows of the file `data`."""
    rows = sum(sample.dtype == "fp32" for sample in samples)
    return f"scripts/fit_gpu_model.py --launch, {rows} fp32 rows of {data} ({_split_text(split)})"


def efficiency_sources(
    gpu: GpuSpec, samples: Sequence[Sample], data: str, split: str, extra_data: str = ""
) -> dict[str, str]:
    """Text for the source of every constant that `fit` fitted to `samples`, rows of the file `data`.

    A constant that was not fitted is assumed, and keeps its reason.

    Parameters
    ----------
    extra_data : str, optional
        Name of a second file, if `samples` contain its GEMMs too.
    """
    emitted = "step_cycles" in gpu.efficiency
    groups = [] if emitted else sample_groups(samples)
    fitted = (
        set(EMITTED_CONSTANTS) if emitted else {name for name in GPU_CONSTANTS if gpu.efficiency[name] > 0}
    )
    for member in groups:
        suffix = _constant_suffix(member, groups)
        fitted |= set(_free_constants([member], suffix))
        if _has_unknown_splits([member]):
            fitted.add(f"split_limit{suffix}")
    runs = "Accel-Sim runs" if all(sample.channels for sample in samples) else "measured kernels"
    files = f"{data} ({_split_text(split)})" + (f" and {extra_data} (GEMMs)" if extra_data else "")
    source = f"fitted to {runs}: {len(samples)} rows of {files}, scripts/fit_gpu_model.py"
    sources = {}
    for key in gpu.efficiency:
        reason = gpu.sources.get(f"efficiency.{key}", "")
        if "assumed" not in reason:
            no_reason = f"not fitted; no row of {data} tells it"
            reason = f"assumed: {f'as it was, {reason}' if reason else no_reason}"
        sources[key] = source if key in fitted else reason
    return sources


def write_efficiency(path: str | os.PathLike[str], gpu: GpuSpec, sources: Mapping[str, str]) -> None:
    """Replace the table ``efficiency`` of a GPU's TOML file; the rest stays as it is.

    `sources` has the source of each constant.

    Raises
    ------
    SpecError
        If the file cannot be read, or has no such table.
    OutputError
        If it cannot be written.
    """
    rows = "".join(
        f"{key} = {{ value = {value:g}, source = {json.dumps(sources[key])} }}\n"
        for key, value in sorted(gpu.efficiency.items())
    )
    _rewrite(path, "efficiency", r"\[efficiency\]\n.*?(?=^\[(?!efficiency)|\Z)", f"[efficiency]\n{rows}\n")


def write_launch(path: str | os.PathLike[str], gpu: GpuSpec, source: str) -> None:
    """Replace the field ``launch_ns`` of a GPU's TOML file, which is one line; the rest stays as it is.

    Raises
    ------
    SpecError
        If the file cannot be read, or has no such line.
    OutputError
        If it cannot be written.
    """
    line = f"launch_ns = {{ value = {gpu.launch_ns:g}, source = {json.dumps(source)} }}\n"
    _rewrite(path, "launch_ns", r"^launch_ns = [^\n]*\n", line)


def _rewrite(path: str | os.PathLike[str], field: str, pattern: str, replacement: str) -> None:
    path = Path(path)
    try:
        spec = path.read_text(encoding="utf-8")
    except OSError as error:
        raise SpecError(f"{path}: {error.strerror}") from error
    spec, count = re.subn(pattern, lambda _: replacement, spec, flags=re.S | re.M)
    if count != 1:
        raise SpecError(f"{path}: has no field '{field}' in the format that can be rewritten")
    replace_file(path, spec.encode())
