"""Measured GPU kernels: reads CSV files as samples, and scores models on them.

The format is recognised by its columns, in any order, beside any others: convolution latencies of TensorRT
(``n,ic,ih,iw,oc,k,stride,type,dtype,ms``) and of DeepBench (``n,ic,ih,iw,oc,kh,kw,pad_h,pad_w,stride_h,
stride_w,dtype,ms``), launch included, and Accel-Sim cycles, of hand-written kernels (``kernel,M,N,K,tile_m,
tile_n,n_mem,gpu_sim_cycle``) and of those that pimflow emits (``EMITTED``); and kernels that a card ran with
an empty L2 (``MEASURED``), which ``scripts/measure_gpu.py`` writes.
"""

from __future__ import annotations

import csv
import dataclasses
import functools
import os
import re
import zlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from math import inf, isfinite
from typing import Any

import numpy as np

from pimflow.core.kernel import ConvGeometry, Kernel, convolution_kernel
from pimflow.errors import TraceError
from pimflow.hardware.gpu import GpuSpec
from pimflow.simulators.gpu.learned_model import Learned, gpus_with_model, residual_class
from pimflow.simulators.gpu.machine import has_rate
from pimflow.simulators.gpu.model import SIZES, KernelRequest, kernel_cost

CLASSES = ("all", "1x1", "3x3_s1", "3x3_s2", "other", "depthwise", "small", "fused", "split", "row", "stream")
SMALL_ROWS, SMALL_CHANNELS = 112, 1024  # largest input rows and channels of class `small`: layers of CNNs
TENSORRT = {"n", "ic", "ih", "iw", "oc", "k", "stride", "type", "dtype", "ms"}
DEEPBENCH = {"n", "ic", "ih", "iw", "oc", "kh", "kw", "pad_h", "pad_w", "stride_h", "stride_w", "dtype", "ms"}
ACCELSIM = {"kernel", "M", "N", "K", "tile_m", "tile_n", "n_mem", "gpu_sim_cycle"}
EMITTED = {"kernel", "kind", *SIZES, "tile_m", "tile_n", "split", "n_mem", "gpu_sim_cycle"}
MEASURED = {"kernel", "kind", *SIZES, "dtype", "cold_ns", "launch_ns"}
# DeepBench's names of storage in fp16: with products on tensor cores, or in fp32.
STORAGE = {"fp16_tc": "fp16", "fp16_storage_fp32_math": "fp16"}
STREAM = re.compile(r"(read|write|copy)(\d+)m(_r)?")


@dataclass(frozen=True, kw_only=True)
class Sample:
    """A measured kernel.

    Attributes
    ----------
    channels : int, optional
        Memory channels of the run; None for all channels of the GPU.
    tile : tuple of int, optional
        (tm, tn), or (tm, tn, split) with split-K, if it is known.
    measured_ns : float
        Launch included.
    shape : str
        Key of the fit/held-out split: the same for both dtypes.
    gpu : str
        Name of the GPU in its file; empty if there is none.
    emitted : bool
        Whether pimflow emitted the kernel.
    """

    kernel: Kernel
    dtype: str
    channels: int | None = None
    tile: tuple[int, ...] | None = None
    measured_ns: float
    classes: tuple[str, ...]
    shape: str
    gpu: str = ""
    emitted: bool = False

    @property
    def is_fused(self) -> bool:
        """Whether a residual addition is fused.

        The library then has fewer kernels to choose from, which the analytic model does not know. So its
        constants are not fitted to such samples.
        """
        return "fused" in self.classes

    @property
    def kind(self) -> str:
        """The kernel's kind, or ``row`` if it is known to run as a matrix-vector product."""
        return "row" if "row" in self.classes else self.kernel.kind

    @property
    def is_simulated(self) -> bool:
        """Whether it is a run of Accel-Sim, whose memory channels are known."""
        return self.channels is not None

    @property
    def is_fit_sample(self) -> bool:
        """Whether models may be fitted to it; the other half of the shapes tests the fit."""
        return zlib.crc32(self.shape.encode()) % 2 == 0


def convolution_classes(geometry: ConvGeometry) -> tuple[str, ...]:
    """The classes of `CLASSES` to which a convolution belongs."""
    small = ("small",) if geometry.h <= SMALL_ROWS and geometry.c <= SMALL_CHANNELS else ()
    return ("all", residual_class(geometry), *small)


def _tensorrt_sample(row: dict[str, str]) -> Sample:
    n, ic, ih, iw, oc, k, stride = (int(row[name]) for name in ("n", "ic", "ih", "iw", "oc", "k", "stride"))
    geometry = ConvGeometry(
        n=n,
        h=ih,
        w=iw,
        c=ic,
        oc=oc,
        kh=k,
        kw=k,
        stride=(stride, stride),
        padding=(k // 2,) * 4,
        groups=ic if row["type"].lower() == "depthwise" else 1,
    )
    fused = bool(int(row.get("elmt_fused") or 0))
    return _convolution_sample(geometry, row, f"{n},{ic},{ih},{iw},{oc},{k},{stride}", fused)


def _deepbench_sample(row: dict[str, str]) -> Sample:
    names = ("n", "ic", "ih", "iw", "oc", "kh", "kw", "pad_h", "pad_w", "stride_h", "stride_w")
    sizes = [int(row[name]) for name in names]
    n, ic, ih, iw, oc, kh, kw, pad_h, pad_w, stride_h, stride_w = sizes
    geometry = ConvGeometry(
        n=n,
        h=ih,
        w=iw,
        c=ic,
        oc=oc,
        kh=kh,
        kw=kw,
        stride=(stride_h, stride_w),
        padding=(pad_h, pad_w, pad_h, pad_w),
    )
    return _convolution_sample(geometry, row, ",".join(map(str, sizes)))


def _convolution_sample(
    geometry: ConvGeometry, row: dict[str, str], shape: str, fused: bool = False
) -> Sample:
    dtype, measured_ns = STORAGE.get(row["dtype"], row["dtype"]), float(row["ms"]) * 1e6
    if min(geometry.n, geometry.c, geometry.oc, geometry.oh, geometry.ow) < 1 or not 0 < measured_ns < inf:
        raise ValueError("sizes and latency are positive numbers")
    kernel = convolution_kernel(geometry, dtype)
    if fused:
        kernel = dataclasses.replace(kernel, input_bytes=kernel.input_bytes + kernel.output_bytes)
    return Sample(
        kernel=kernel,
        dtype=dtype,
        measured_ns=measured_ns,
        classes=convolution_classes(geometry) + ("fused",) * fused,
        shape=shape,
    )


def _accel_sim_sample(row: dict[str, str], gpu: GpuSpec) -> Sample | None:
    name, dtype, tile = row["kernel"], "fp16", None
    if row["M"]:
        m, n, k = int(row["M"]), int(row["N"]), int(row["K"])
        tile = (int(row["tile_m"]), int(row["tile_n"]))
        kernel = Kernel(
            kind="gemm",
            m=m,
            n=n,
            k=k,
            macs=m * n * k,
            input_bytes=m * k * 2,
            weight_bytes=n * k * 2,
            output_bytes=m * n * 2,
        )
    elif match := STREAM.fullmatch(name):
        operation, mebibytes, reads_only = match.groups()
        size = int(mebibytes) << 20
        kernel = Kernel(
            kind="stream",
            input_bytes=0 if operation == "write" else size,
            output_bytes=0 if operation == "read" or reads_only else size,
        )
    else:
        return None  # the empty kernel, from which `launch_ns` is taken
    return Sample(
        kernel=kernel,
        dtype=dtype,
        channels=int(row["n_mem"]),
        tile=tile,
        measured_ns=int(row["gpu_sim_cycle"]) / gpu.clock_mhz * 1e3,
        classes=("all", "stream") if tile is None else ("all", "1x1"),
        shape=name,
    )


def _pimflow_sample(row: dict[str, str], gpu: GpuSpec) -> Sample:
    """A kernel that pimflow emitted; kind ``gemm`` without a tile is the product of a row with a matrix."""
    kernel = _kernel(row)
    tile = tuple(int(row[name]) for name in ("tile_m", "tile_n", "split")) if row["tile_m"] else None
    name = _family(kernel)
    if kernel.kind == "gemm":
        name = "row" if tile is None else "split" if tile[2] > 1 else name
    return Sample(
        kernel=kernel,
        dtype="fp16",
        channels=int(row["n_mem"]),
        tile=tile,
        measured_ns=int(row["gpu_sim_cycle"]) / gpu.clock_mhz * 1e3,
        classes=("all", name),
        shape=row["kernel"],
        emitted=True,
    )


def _card_sample(row: dict[str, str]) -> Sample | None:
    """A kernel that was measured on a GPU; None if the GPU could not run it."""
    if not row["cold_ns"]:
        return None
    kernel = _kernel(row)
    return Sample(
        kernel=kernel,
        dtype=row["dtype"],
        measured_ns=float(row["cold_ns"]) + float(row["launch_ns"]),
        classes=("all", _family(kernel)),
        shape=row["kernel"],
    )


def _kernel(row: dict[str, str]) -> Kernel:
    sizes: dict[str, Any] = {name: int(row[name]) for name in SIZES}
    return Kernel(kind=row["kind"], **sizes)


def _family(kernel: Kernel) -> str:
    """The class of `CLASSES` to which a kernel belongs, whatever its tile."""
    if kernel.kind != "gemm":
        return kernel.kind
    return {1: "1x1", 9: f"3x3_s{kernel.stride}"}.get(kernel.window, "other")


def read_samples(path: str | os.PathLike[str], gpu: GpuSpec) -> list[Sample]:
    """Samples of a CSV file in any known format; if its column ``gpu`` names several GPUs, those of `gpu`.

    Raises
    ------
    TraceError
        If the file cannot be read, has no known format, has rows of several GPUs but none of this one, or has
        a malformed row.
    """
    try:
        with open(path, encoding="utf-8", newline="") as file:
            reader = csv.DictReader(file)
            columns = set(reader.fieldnames or ())
            rows = list(enumerate(reader, start=2))
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise TraceError(f"{path}: cannot be read: {error}") from error
    parse: Callable[[dict[str, str]], Sample | None]
    if columns >= TENSORRT:
        parse = _tensorrt_sample
    elif columns >= DEEPBENCH:
        parse = _deepbench_sample
    elif columns >= EMITTED:
        parse = functools.partial(_pimflow_sample, gpu=gpu)
    elif columns >= MEASURED:
        parse = _card_sample
    elif columns >= ACCELSIM:
        parse = functools.partial(_accel_sim_sample, gpu=gpu)
    else:
        raise TraceError(f"{path}: columns are neither those of latencies nor of Accel-Sim cycles")
    samples = []
    for line, row in _gpu_rows(gpu, rows, path):
        try:
            sample = parse(row)
        except (ValueError, KeyError, TypeError, AttributeError, ZeroDivisionError) as error:
            raise TraceError(f"{path}:{line}: malformed row: {error}") from error
        if sample is not None:
            samples.append(dataclasses.replace(sample, gpu=row.get("gpu") or ""))
    return samples


def _gpu_rows(
    gpu: GpuSpec, rows: list[tuple[int, dict[str, str]]], path: str | os.PathLike[str]
) -> list[tuple[int, dict[str, str]]]:
    names = sorted({row.get("gpu") or "" for _, row in rows})
    if len(names) < 2:
        return rows
    rows_of_gpu = [
        (line, row) for line, row in rows if plain_name(row.get("gpu") or "") == plain_name(gpu.name)
    ]
    if not rows_of_gpu:
        raise TraceError(f"{path}: no rows of gpu '{gpu.name}'; there are {', '.join(filter(None, names))}")
    return rows_of_gpu


def plain_name(name: str) -> str:
    """Letters and digits of `name`, in lower case: ``gtx-1080-ti`` and ``GTX1080Ti`` are one GPU."""
    return re.sub(r"[^a-z0-9]", "", name.lower())


def analytic_ns(samples: Sequence[Sample], gpu: GpuSpec) -> list[float]:
    """Times of `samples` by the analytic model, launch included."""
    return [
        kernel_cost(s.kernel, gpu, dtype=s.dtype, channels=s.channels, tile=s.tile).total_ns for s in samples
    ]


def residual_model_ns(samples: Sequence[Sample], gpu: GpuSpec) -> list[float]:
    """Times of measured kernels by the learned model, launch included."""
    total_ns = [0.0] * len(samples)
    for dtype in sorted({sample.dtype for sample in samples}):
        indices = [i for i, sample in enumerate(samples) if sample.dtype == dtype]
        requests = [
            KernelRequest(samples[i].kernel, samples[i].channels or gpu.memory_channels) for i in indices
        ]
        for i, cost in zip(indices, Learned().costs(requests, gpu, dtype)):
            total_ns[i] = cost.total_ns
    return total_ns


def best_ns(samples: Sequence[Sample], gpu: GpuSpec) -> list[float]:
    """Times by the learned model if the GPU has one, else by the analytic model."""
    return (residual_model_ns if gpu.name in gpus_with_model() else analytic_ns)(samples, gpu)


PREDICTIONS = {"analytic": analytic_ns, "learned": residual_model_ns, "best": best_ns}


def validate(
    samples: Iterable[Sample],
    gpu: GpuSpec,
    predicted_ns: Callable[[Sequence[Sample], GpuSpec], Sequence[float]] = analytic_ns,
) -> dict[str, dict[str, dict[str, float | None]]]:
    """Errors of a model on `samples`, launch included, by dtype and class.

    Samples of a dtype that the GPU has no rate for are left out.

    Returns
    -------
    dict
        ``{dtype: {class: {count, median_ape, mape, largest_ape, bias, kendall_tau}}}``; errors are fractions,
        ``bias`` is their signed mean; the rank correlation is None for fewer than two kernels or equal times.
    """
    rated_samples = [sample for sample in samples if has_rate(gpu, sample.dtype)]
    groups: dict[str, dict[str, list[tuple[float, float]]]] = {}
    for sample, total_ns in zip(rated_samples, predicted_ns(rated_samples, gpu)):
        for name in sample.classes:
            pairs = groups.setdefault(sample.dtype, {}).setdefault(name, [])
            pairs.append((sample.measured_ns, total_ns))
    return {
        dtype: {name: _errors(classes[name]) for name in CLASSES if name in classes}
        for dtype, classes in sorted(groups.items())
    }


def format_accuracy(accuracy: dict[str, dict[str, dict[str, float | None]]]) -> str:
    """The result of `validate` as a text table."""
    lines = [f"{'dtype':6} {'class':10} {'rows':>6} {'median':>8} {'mean':>8} {'bias':>8} {'tau':>7}"]
    for dtype, classes in accuracy.items():
        for name, row in classes.items():
            tau = "-" if row["kendall_tau"] is None else f"{row['kendall_tau']:.3f}"
            errors = f"{row['median_ape']:8.1%} {row['mape']:8.1%} {row['bias']:+8.1%} {tau:>7}"
            lines.append(f"{dtype:6} {name:10} {row['count']:6} {errors}")
    return "\n".join(lines)


def _errors(pairs: list[tuple[float, float]]) -> dict[str, float | None]:
    from scipy.stats import kendalltau  # takes half a second, so it is imported only where it is needed

    measured, predicted = np.array(pairs).T
    ape = np.abs(predicted / measured - 1)
    tau = kendalltau(measured, predicted).statistic if len(pairs) > 1 else inf
    return {
        "count": len(pairs),
        "median_ape": float(np.median(ape)),
        "mape": float(ape.mean()),
        "largest_ape": float(ape.max()),
        "bias": float((predicted / measured - 1).mean()),
        "kendall_tau": float(tau) if isfinite(tau) else None,
    }
