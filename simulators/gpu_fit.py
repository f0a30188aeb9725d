"""Fit of the GPU model's constants to measured kernels, and their place in the preset's file."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence

import numpy as np
from scipy.optimize import least_squares

from pimflow.hardware.gpu import GpuSpec
from pimflow.simulators.gpu_data import Sample
from pimflow.simulators.gpu_model import Batch, Machine, Ways, demands, execution_cycles, family

# constant -> (least, most): shares of a peak, cycles, bytes per cycle; Winograd makes `mma` exceed 1
OF_THE_GPU = {
    "sm_port_bytes_per_cycle": (8.0, 64.0),
    "l2": (0.1, 1.0),
    "dram": (0.4, 1.0),
    "dram_write": (0.4, 1.2),
    "l2_resident": (0.01, 1.0),
    "l2_reuse": (0.05, 2.0),
    "reread": (0.01, 1.0),
    "overlap": (1.0, 8.0),
}
OF_A_GEMM = {
    "mma": (0.3, 2.5),
    "tile_half": (0.5, 64.0),
    "iteration_cycles": (20.0, 3000.0),
    "tile_power": (0.05, 2.0),
    "block_cycles": (50.0, 20000.0),
    "kernel_cycles": (1.0, 40000.0),
    "split_cycles": (50.0, 100000.0),
}
OF_A_FAMILY = {
    "depthwise": {
        "depthwise": (0.01, 1.0),
        "kernel_cycles": (1.0, 40000.0),
        "sm_port_bytes_per_cycle": (1.0, 64.0),
    },
    "stream": {"kernel_cycles": (1.0, 40000.0)},
}
OWN_CONSTANTS = 50  # samples that a family needs to have constants of its own
ROUNDS = 3
HUBER = 0.1  # log error beyond which a sample counts linearly: a library's odd choice of kernel


@dataclasses.dataclass(frozen=True)
class Group:
    """Samples that share their constants and their channels."""

    family: str
    dtype: str
    channels: int | None
    ways: Ways | None
    samples: tuple[Sample, ...]
    batch: Batch
    log_measured_ns: np.ndarray

    def error(self, gpu: GpuSpec) -> np.ndarray:
        """log(predicted / measured) of each sample."""
        machine = Machine(gpu, self.dtype, self.channels, self.family)
        kind = self.samples[0].kernel.kind
        cycles = [
            execution_cycles(demand, machine).min(axis=1)
            for demand in demands(kind, self.batch, machine, self.ways)
        ]
        predicted_ns = np.min(cycles, axis=0) / machine.cycles_per_ns + gpu.launch_ns
        return np.log(predicted_ns) - self.log_measured_ns


def group(samples: Iterable[Sample]) -> list[Group]:
    """Samples by what the model evaluates at once."""
    found: dict[tuple, list[Sample]] = {}
    for sample in samples:
        key = (family(sample.kernel), sample.dtype, sample.channels or 0, sample.tile or ())
        found.setdefault(key, []).append(sample)
    return [
        Group(
            family=name,
            dtype=dtype,
            channels=channels or None,
            ways=Ways([(*tile, 1)]) if tile else None,
            samples=tuple(members),
            batch=Batch([sample.kernel for sample in members]),
            log_measured_ns=np.log([sample.measured_ns for sample in members]),
        )
        for (name, dtype, channels, tile), members in sorted(found.items())
    ]


def fit(gpu: GpuSpec, samples: Sequence[Sample]) -> GpuSpec:
    """`gpu` with the constants that fit `samples` best.

    The error is logarithmic and robust. What belongs to the GPU (bandwidths, caches) is fitted to all
    samples; what belongs to a family of kernels (latencies, use of the tensor cores, whether the
    library splits K) to those of the family, in turns. Constants that are zero stay zero.
    """
    groups = group(samples)
    families: dict[tuple[str, str], list[Group]] = {}
    for member in groups:
        own = sum(len(g.samples) for g in groups if (g.family, g.dtype) == (member.family, member.dtype))
        key = (member.family, member.dtype) if own >= OWN_CONSTANTS else ("", "")
        if member.family == "stream":
            key = ("stream", "")
        families.setdefault(key, []).append(member)
    for _ in range(ROUNDS):
        for (name, dtype), members in families.items():
            gpu = _fit_family(gpu, members, name, dtype)
        gpu = _solve(gpu, groups, {name: (name, bounds) for name, bounds in OF_THE_GPU.items()})
    for (name, dtype), members in families.items():
        gpu = _fit_family(gpu, members, name, dtype)
    return gpu


def _fit_family(gpu: GpuSpec, members: Sequence[Group], name: str, dtype: str) -> GpuSpec:
    suffix = "".join(f"_{part}" for part in (name, dtype) if part)
    bounds = OF_A_FAMILY.get(name, OF_A_GEMM)
    free = {key + suffix: (key, limits) for key, limits in bounds.items()}
    if name in OF_A_FAMILY or not name:
        return _solve(gpu, members, free)
    tried = [_solve(_with(gpu, {f"split_limit{suffix}": limit}), members, free) for limit in (1.0, 32.0)]
    return min(tried, key=lambda candidate: _loss(np.concatenate([g.error(candidate) for g in members])))


def _loss(error: np.ndarray) -> float:
    return float(np.sum(np.sqrt(1 + (error / HUBER) ** 2) - 1))


def _with(gpu: GpuSpec, constants: Mapping[str, float]) -> GpuSpec:
    return dataclasses.replace(gpu, efficiency={**gpu.efficiency, **constants})


def _solve(gpu: GpuSpec, members: Sequence[Group], free: dict[str, tuple[str, tuple[float, float]]]) -> GpuSpec:
    """`gpu` with the constants `free` (key -> where its first value is, bounds) fitted to `members`."""
    known = gpu.efficiency
    start = {key: known.get(key, known[base]) for key, (base, _) in free.items() if known.get(key, known[base])}
    lower, upper = np.log(np.array([free[key][1] for key in start])).T
    first = np.clip(np.log(list(start.values())), lower + 1e-6, upper - 1e-6)

    def constants(point: np.ndarray) -> dict[str, float]:
        return dict(zip(start, map(float, np.exp(point))))

    def error(point: np.ndarray) -> np.ndarray:
        candidate = _with(gpu, constants(point))
        return np.concatenate([member.error(candidate) for member in members])

    found = least_squares(
        error, first, bounds=(lower, upper), loss="soft_l1", f_scale=HUBER, diff_step=1e-2, max_nfev=60
    )
    return _with(gpu, constants(found.x))
