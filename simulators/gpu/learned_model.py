"""Learned GPU model: corrects the analytic times of a library's convolutions by measurements.

The time of a kernel is the analytic time times a factor, which gradient-boosted trees (xgboost) predict from
the terms of the analytic model::

    total = max(factor * (execution + launch) - launch, MIN_EXECUTION_SHARE * execution) + launch

The terms are those of the layer's square map: one square image as wide as the layer's, all memory channels.
So a layer has one factor, whatever its share of rows and its number of memory channels. As in the analytic
model, more rows, more bytes or fewer memory channels never make a kernel of the layer faster. An epilogue
that reads another tensor can only raise the factor (a monotone constraint). More channels of the layer may
lower it: libraries have special code for multiples of eight or of sixty-four.

A model is one file, ``learned/<gpu>.<dtype>.ubj.xz``, written by ``scripts/fit_gpu_model.py --learned``. It
names its data, and is rejected if the GPU's constants are not those that it corrects. Classes of convolutions
for which the factor did not help in cross-validation keep the analytic time.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import lzma
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from pimflow.core.kernel import ConvGeometry, Kernel, convolution_kernel
from pimflow.errors import SpecError, UnknownNameError
from pimflow.hardware.gpu import GpuSpec
from pimflow.simulators.gpu.machine import TILES, KernelBatch, RooflineMachine, family, gemm_tilings
from pimflow.simulators.gpu.model import KernelCost, kernel_cost
from pimflow.simulators.gpu.roofline import demands, execution_cycles

if TYPE_CHECKING:
    import xgboost

    from pimflow.simulators.gpu.model import KernelRequest

FOLDER = Path(__file__).parent / "learned"
# Fields of a GPU that decide its analytic times.
TIMING_FIELDS = (
    *("sms", "clock_mhz", "fma_per_sm_cycle", "simd_fma_per_sm_cycle", "shared_memory_bytes"),
    *("registers_bytes", "memory_channels", "channel_bytes_per_ns", "l2_bytes_per_channel"),
    *("l2_bytes_per_channel_cycle", "write_factor", "efficiency"),
)
SUFFIX = ".ubj.xz"
MIN_EXECUTION_SHARE = 0.1  # of the analytic execution; matters where the launch dominates
MAX_ALIGNMENT = 7  # largest number of factors of two in a number of channels that is a feature
TERMS = ("compute", "l2", "dram")
SHAPE = (
    *("input_channels", "output_channels", "reduction", "window", "stride", "pixels", "macs", "input_bytes"),
    *("weight_bytes", "output_bytes", "output_per_input_channel", "input_channel_blocks"),
    "output_channel_blocks",
)
BLOCK_CHANNELS = 32
FEATURES = (
    "epilogue_reads",
    "depthwise",
    "image",
    *(f"{name}_alignment" for name in ("input", "output", "pixel")),
    *(f"log_{name}" for name in SHAPE),
    "log_total_ns",
    *(f"log_{name}_ns" for name in TERMS),
    *(f"log_ns_{tm}x{tn}" for tm, tn in TILES),
    *(f"log_waves_{tm}x{tn}" for tm, tn in TILES),
)


def gpus_with_model() -> list[str]:
    """Names of the GPUs that have a learned model."""
    return sorted({path.name.split(".")[0] for path in FOLDER.glob(f"*{SUFFIX}")})


def residual_path(name: str, dtype: str) -> Path:
    """The file of the learned model of an embedded GPU."""
    return FOLDER / f"{name}.{dtype}{SUFFIX}"


def constants_digest(gpu: GpuSpec) -> str:
    """Digest of the constants that the analytic time depends on, without the launch."""
    values = {name: getattr(gpu, name) for name in TIMING_FIELDS}
    return f"{zlib.crc32(json.dumps(values, sort_keys=True).encode()):08x}"


@dataclasses.dataclass(frozen=True)
class ResidualModel:
    """A learned model of one GPU at one dtype.

    Attributes
    ----------
    booster : xgboost.Booster
        Predicts log(measured / analytic) from `FEATURES`.
    about : dict
        ``gpu``, ``dtype``, ``constants`` (`constants_digest`), ``launch_ns`` of the rows that it was fitted
        to, ``source``, and ``classes``: by class ``rows`` and the cross-validated median errors ``analytic``
        and ``learned``, as fractions.
    """

    booster: xgboost.Booster
    about: dict[str, Any]

    def applies_to(self, geometry: ConvGeometry) -> bool:
        """Whether the factor reduced the error for convolutions of this class in cross-validation."""
        errors = self.about["classes"].get(residual_class(geometry))
        return errors is not None and errors["learned"] < errors["analytic"]

    def factors(self, kernels: Sequence[Kernel], gpu: GpuSpec) -> np.ndarray:
        """Predicted ratio of measured to analytic time; 1 for kernels to which the model does not apply."""
        factors = np.ones(len(kernels))
        indices = [i for i, k in enumerate(kernels) if k.geometry is not None and self.applies_to(k.geometry)]
        if indices:
            table = features([kernels[i] for i in indices], gpu, self.about["dtype"])
            factors[indices] = np.exp(self.booster.inplace_predict(table))
        return factors


def residual_class(geometry: ConvGeometry) -> str:
    """Class of a convolution for `ResidualModel.applies_to`."""
    if geometry.is_depthwise:
        return "depthwise"
    window = (geometry.kh, geometry.kw)
    if window == (3, 3) and geometry.stride in ((1, 1), (2, 2)):
        return f"3x3_s{geometry.stride[0]}"
    return "1x1" if window == (1, 1) else "other"


@functools.cache
def load_residual(path: Path) -> ResidualModel:
    """Read a learned model's file; raises `SpecError` if it cannot be read, or is not a learned model."""
    import xgboost

    try:
        booster = xgboost.Booster(params={"nthread": 1})
        booster.load_model(bytearray(lzma.decompress(path.read_bytes())))
        return ResidualModel(booster, json.loads(booster.attr("about") or ""))
    except OSError as error:
        raise SpecError(f"{path}: cannot be read: {error.strerror}") from error
    except (lzma.LZMAError, xgboost.core.XGBoostError, ValueError) as error:
        raise SpecError(f"{path}: not a learned model: {str(error).splitlines()[0]}") from error


def residual_model(gpu: GpuSpec, dtype: str) -> ResidualModel:
    """The learned model of `gpu` at `dtype`.

    Raises
    ------
    UnknownNameError
        If the GPU has none; the message names those that have one.
    SpecError
        If there is none for `dtype`, or the GPU's constants are not those that the model corrects.
    """
    if gpu.name not in gpus_with_model():
        raise UnknownNameError("GPU with a learned model", gpu.name, gpus_with_model())
    path = residual_path(gpu.name, dtype)
    if not path.exists():
        raise SpecError(f"gpu '{gpu.name}': no learned model of '{dtype}'; use the analytic model")
    residual = load_residual(path)
    if residual.about["constants"] != constants_digest(gpu):
        raise SpecError(
            f"gpu '{gpu.name}': its learned model was fitted to other constants; fit it again with "
            "scripts/fit_gpu_model.py --learned, or use the analytic model"
        )
    return residual


def square_map(geometry: ConvGeometry) -> ConvGeometry:
    """The layer on one image as high as it is wide; it is the same for all shares of the layer's rows."""
    side = max(geometry.w, (geometry.kh - 1) * geometry.dilation[0] + 1)
    _, pad_left, _, pad_right = geometry.padding
    return dataclasses.replace(geometry, n=1, h=side, padding=(pad_left, pad_left, pad_right, pad_right))


def features(kernels: Sequence[Kernel], gpu: GpuSpec, dtype: str) -> np.ndarray:
    """`FEATURES` of kernels that have a geometry, one row for each kernel."""
    table = np.full((len(kernels), len(FEATURES)), np.nan, dtype=np.float32)
    squares = [convolution_kernel(square_map(_geometry(kernel)), dtype) for kernel in kernels]
    members: dict[tuple[str, str], list[int]] = {}
    for index, (kernel, square) in enumerate(zip(kernels, squares)):
        table[index, : -len(TERMS) - 1 - 2 * len(TILES)] = _shape_features(kernel, square, dtype)
        members.setdefault((square.kind, family(square)), []).append(index)
    for (kind, name), rows in members.items():
        terms = _analytic_features(kind, [squares[i] for i in rows], RooflineMachine(gpu, dtype, None, name))
        table[rows, -len(TERMS) - 1 - 2 * len(TILES) :] = terms
    return table


def _geometry(kernel: Kernel) -> ConvGeometry:
    assert kernel.geometry is not None, "the model is of convolutions"
    return kernel.geometry


def _shape_features(kernel: Kernel, square: Kernel, dtype: str) -> list[float]:
    geometry = _geometry(square)
    plain_kernel = convolution_kernel(_geometry(kernel), dtype)
    pixels = geometry.pixels
    sizes = (
        geometry.c,
        geometry.oc,
        geometry.reduction,
        square.window,
        square.stride,
        pixels,
        square.macs,
        square.input_bytes,
        square.weight_bytes,
        square.output_bytes,
        geometry.oc / geometry.c,
        -(-geometry.c // BLOCK_CHANNELS),
        -(-geometry.oc // BLOCK_CHANNELS),
    )
    alignment = (min((n & -n).bit_length() - 1, MAX_ALIGNMENT) for n in (geometry.c, geometry.oc, pixels))
    flags = (kernel.input_bytes > plain_kernel.input_bytes, geometry.is_depthwise, family(square) == "image")
    return [*flags, *alignment, *np.log(sizes)]


def _analytic_features(kind: str, kernels: Sequence[Kernel], machine: RooflineMachine) -> np.ndarray:
    batch = KernelBatch(kernels)
    kernel_demands = demands(kind, batch, machine)
    cycles = execution_cycles(kernel_demands[0], machine)
    total = np.min([execution_cycles(demand, machine).min(axis=1) for demand in kernel_demands], axis=0)
    terms = [getattr(kernel_demands[0], name).min(axis=1) for name in TERMS]
    times = np.log(np.maximum(np.array([total, *terms]) / machine.cycles_per_ns, 1e-3)).T
    if kind != "gemm":
        return np.hstack([times, np.full((len(kernels), 2 * len(TILES)), np.nan)])
    tiles = cycles.reshape(len(kernels), len(TILES), -1).min(axis=2) / machine.cycles_per_ns
    tilings = gemm_tilings(1.0)
    blocks = batch.groups * np.ceil(batch.m / tilings.tm) * np.ceil(batch.n / tilings.tn)
    return np.hstack([times, np.log(tiles), np.log(np.ceil(blocks / machine.gpu.sms))])


def correct_cost(cost: KernelCost, factor: float, launch_ns: float) -> KernelCost:
    """`cost` with its total (with a launch of `launch_ns`) times `factor`; the demands stay analytic."""
    scaled = factor * (cost.execution_ns + launch_ns) - launch_ns
    return dataclasses.replace(cost, execution_ns=max(scaled, MIN_EXECUTION_SHARE * cost.execution_ns))


@dataclasses.dataclass(frozen=True)
class Learned:
    """A `GpuProfiler`: the analytic model, corrected by the GPU's learned model."""

    name: str = "learned"
    computes: ClassVar[bool] = True
    primitives: ClassVar[bool] = False

    def costs(self, requests: Sequence[KernelRequest], gpu: GpuSpec, dtype: str) -> list[KernelCost]:
        """The cost of each request, in order.

        Raises
        ------
        UnknownNameError
            If the GPU has no learned model; the message names those that have one.
        SpecError
            If it has none for `dtype`, or its learned model corrects other constants.
        """
        residual = residual_model(gpu, dtype)
        factors = residual.factors([request.kernel for request in requests], gpu)
        return [
            correct_cost(
                kernel_cost(request.kernel, gpu, dtype=dtype, channels=request.channels),
                float(factor),
                residual.about["launch_ns"],
            )
            if factor != 1
            else kernel_cost(request.kernel, gpu, dtype=dtype, channels=request.channels)
            for request, factor in zip(requests, factors)
        ]
