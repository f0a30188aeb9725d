"""Measured GPU kernels: CSV files into samples, and how well a model predicts them.

Two forms are known by their columns: convolution latencies (``n,ic,ih,iw,oc,k,stride,dtype,ms``, whole
kernel, launch included) and Accel-Sim cycles (``kernel,M,N,K,tile_m,tile_n,n_mem,gpu_sim_cycle``).
"""

from __future__ import annotations

import csv
import dataclasses
import os
import re
import zlib
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
from scipy.stats import kendalltau

from pimflow.core.region import ConvGeometry, Kernel, convolution_kernel
from pimflow.errors import TraceError
from pimflow.hardware.gpu import GpuSpec
from pimflow.simulators.gpu_model import kernel_cost

CLASSES = ("all", "1x1", "3x3_s1", "3x3_s2", "other", "depthwise", "small", "fused", "stream")
SMALL_ROWS = 56  # input rows of what `small` means: batch 1, and the maps that CNNs spend most layers on
STREAM = re.compile(r"(read|write|copy)(\d+)m(_r)?")


@dataclass(frozen=True, kw_only=True)
class Sample:
    """One measured kernel.

    Attributes
    ----------
    kernel : Kernel
    dtype : str
    channels : int, optional
        Memory channels it ran with; None for all of the GPU's.
    tile : tuple of int, optional
        (tm, tn) if it is known.
    measured_ns : float
        Launch included.
    classes : tuple of str
        Those of `CLASSES` it counts in.
    shape : str
        Key of the fit/held-out split: the same for both dtypes.
    """

    kernel: Kernel
    dtype: str
    channels: int | None = None
    tile: tuple[int, int] | None = None
    measured_ns: float
    classes: tuple[str, ...]
    shape: str

    @property
    def fused(self) -> bool:
        """Whether a residual addition is fused in; the library then has fewer kernels to choose from,
        which the model does not know, so such rows are neither fitted to nor counted in ``all``."""
        return "fused" in self.classes

    @property
    def fit(self) -> bool:
        """Whether it may be fitted to; the other half judges the fit."""
        return zlib.crc32(self.shape.encode()) % 2 == 0


def convolution_classes(geometry: ConvGeometry) -> tuple[str, ...]:
    """The classes of `CLASSES` that a convolution counts in."""
    if geometry.depthwise:
        return ("all", "depthwise")
    if geometry.kh == 3:
        family = f"3x3_s{geometry.stride[0]}"
    else:
        family = "1x1" if geometry.kh == 1 else "other"
    small = ("small",) if geometry.n == 1 and geometry.h <= SMALL_ROWS else ()
    return ("all", family, *small)


def _convolution(row: dict[str, str]) -> Sample:
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
        groups=ic if row["type"] == "Depthwise" else 1,
    )
    kernel = convolution_kernel(geometry, row["dtype"])
    classes = convolution_classes(geometry)
    if int(row.get("elmt_fused") or 0):
        kernel = dataclasses.replace(kernel, input_bytes=kernel.input_bytes + kernel.output_bytes)
        classes = ("fused",)
    return Sample(
        kernel=kernel,
        dtype=row["dtype"],
        measured_ns=float(row["ms"]) * 1e6,
        classes=classes,
        shape=f"{n},{ic},{ih},{iw},{oc},{k},{stride}",
    )


def _simulated(row: dict[str, str], gpu: GpuSpec) -> Sample | None:
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
        return None  # the empty kernel: it is where `launch_ns` comes from
    return Sample(
        kernel=kernel,
        dtype=dtype,
        channels=int(row["n_mem"]),
        tile=tile,
        measured_ns=int(row["gpu_sim_cycle"]) / gpu.clock_mhz * 1e3,
        classes=("all", "stream") if tile is None else ("all", "1x1"),
        shape=name,
    )


def read_samples(path: str | os.PathLike, gpu: GpuSpec) -> list[Sample]:
    """Samples of a CSV file of either form.

    Raises
    ------
    TraceError
        If the file cannot be read, has neither form, or has a malformed row.
    """
    try:
        with open(path, encoding="utf-8", newline="") as file:
            reader = csv.DictReader(file)
            columns = set(reader.fieldnames or ())
            rows = list(reader)
    except (OSError, UnicodeDecodeError) as error:
        raise TraceError(f"{path}: cannot be read: {error}") from error
    samples = []
    for line, row in enumerate(rows, start=2):
        try:
            if {"n", "ic", "ih", "iw", "oc", "k", "stride", "type", "dtype", "ms"} <= columns:
                sample = _convolution(row)
            elif {"kernel", "M", "N", "K", "tile_m", "tile_n", "n_mem", "gpu_sim_cycle"} <= columns:
                sample = _simulated(row, gpu)
            else:
                raise TraceError(f"{path}: columns are neither those of latencies nor of Accel-Sim cycles")
        except (ValueError, KeyError, TypeError) as error:
            raise TraceError(f"{path}:{line}: malformed row: {error}") from error
        if sample is not None:
            samples.append(sample)
    return samples


def validate(samples: Iterable[Sample], gpu: GpuSpec) -> dict[str, dict[str, dict[str, float]]]:
    """Errors of the model on `samples`, launch included, by dtype and class.

    Returns
    -------
    dict
        ``{dtype: {class: {count, median_ape, mape, kendall_tau}}}``, errors as fractions.
    """
    groups: dict[str, dict[str, list[tuple[float, float]]]] = {}
    for sample in samples:
        cost = kernel_cost(sample.kernel, gpu, dtype=sample.dtype, channels=sample.channels, tile=sample.tile)
        for name in sample.classes:
            pairs = groups.setdefault(sample.dtype, {}).setdefault(name, [])
            pairs.append((sample.measured_ns, cost.total_ns))
    return {
        dtype: {name: _errors(classes[name]) for name in CLASSES if name in classes}
        for dtype, classes in sorted(groups.items())
    }


def format_accuracy(accuracy: dict[str, dict[str, dict[str, float]]]) -> str:
    """What `validate` returns as a table."""
    lines = [f"{'dtype':6} {'class':10} {'rows':>6} {'median':>8} {'mean':>8} {'tau':>7}"]
    for dtype, classes in accuracy.items():
        for name, row in classes.items():
            errors = f"{row['median_ape']:8.1%} {row['mape']:8.1%} {row['kendall_tau']:7.3f}"
            lines.append(f"{dtype:6} {name:10} {row['count']:6} {errors}")
    return "\n".join(lines)


def _errors(pairs: list[tuple[float, float]]) -> dict[str, float]:
    measured, predicted = np.array(pairs).T
    ape = np.abs(predicted / measured - 1)
    tau = kendalltau(measured, predicted).statistic if len(pairs) > 1 else float("nan")
    return {
        "count": len(pairs),
        "median_ape": float(np.median(ape)),
        "mape": float(ape.mean()),
        "kendall_tau": float(tau),
    }
