"""Times of products in tiles, beside measured ones: ``validate_product_tiles.py [CSV] [--update PAGE]``.

Kernels that pimflow compiled and timed on an H200 (`tests/gpu_model/data/h200_measured.csv`, with their
tiles), or those of another card's file that ``measure_gpu.py`` wrote, give the constant of
`core.product_tiles`, the time of a step: it is fitted to the half of the kernels that a
hash chooses, the other half judges it. Then the kernels of five networks by the tiles that these kernels
had, and by those that are chosen now.
"""

from __future__ import annotations

import argparse
import csv
import zlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path

import numpy as np
from scipy.optimize import least_squares
from update_validation import fill

from pimflow import frontend
from pimflow.core.blocks import KernelLimits
from pimflow.core.kernel import Kernel
from pimflow.core.product_tiles import BlockTile, ProductShape, fastest_tile, product_ns
from pimflow.hardware import GpuSpec
from pimflow.relay_passes.regions.extract_regions import extract_regions
from pimflow.simulators.gpu.model import SIZES
from pimflow.simulators.gpu.region_kernels import gpu_kernels

DATA = Path(__file__).parents[1] / "tests/gpu_model/data/h200_measured.csv"
START_NS = 600.0  # where the fit begins
HUBER = 0.1  # log error beyond which a kernel counts linearly
# Microseconds on an H100 80GB, fp16, batch 1, medians: PyTorch 2.11 as CUDA graphs, torch.compile without
# max-autotune, and where that was not run its eager kernels (*); kernels of pimflow at 8b3841e5.
H100_US = {
    "mobilenet-v2": ("421", 340),
    "efficientnet-b0": ("900 *", 711),
    "mnasnet-1.0": ("582 *", None),
    "resnet-50": ("474", 683),
    "vgg-16": ("498 *", None),
}


@dataclass(frozen=True)
class MeasuredKernel:
    """A kernel with its time on a card, its L2 empty, and that of a launch; `tile` is None without one."""

    name: str
    kernel: Kernel
    measured_ns: float
    launch_ns: float
    tile: BlockTile | None

    @property
    def is_fitted(self) -> bool:
        """Whether the constants are fitted to it."""
        return zlib.crc32(self.name.encode()) % 2 == 0


def kernel_measurements(rows: Iterable[Mapping[str, str]]) -> list[MeasuredKernel]:
    """All kernels of a file that were timed."""
    kernels = []
    for row in (row for row in rows if row["cold_ns"]):
        kernel = Kernel(kind=row["kind"], **{size: int(row[size]) for size in SIZES})
        tile = BlockTile.from_text(row["tile"]) if row["tile"] else None
        kernels.append(
            MeasuredKernel(row["kernel"], kernel, float(row["cold_ns"]), float(row["launch_ns"]), tile)
        )
    return kernels


def product_shape(kernel: Kernel) -> ProductShape:
    """A kernel as a product."""
    return ProductShape(
        batch=kernel.groups,
        rows=kernel.m,
        columns=kernel.n,
        depth=kernel.k,
        run=kernel.k // kernel.window,
    )


def terms(kernel: MeasuredKernel, limits: KernelLimits) -> tuple[float, float]:
    """Steps of a product, and its time but for steps."""
    shape, tile = product_shape(kernel.kernel), kernel.tile
    assert tile is not None
    other = product_ns(shape, tile, replace(limits, step_ns=0.0))
    return product_ns(shape, tile, replace(limits, step_ns=1.0)) - other, other


def fit(kernels: list[MeasuredKernel], limits: KernelLimits) -> tuple[float, list[str]]:
    """Nanoseconds of a step, and a table of errors."""
    steps, other = np.array([terms(kernel, limits) for kernel in kernels]).T
    launch = np.array([kernel.launch_ns for kernel in kernels])
    measured = launch + np.array([kernel.measured_ns for kernel in kernels])
    fitted = np.array([kernel.is_fitted for kernel in kernels])

    def log_errors(step_ns: float) -> np.ndarray:
        """Of all kernels, with their launch: the shortest take less time than its measurement varies."""
        errors: np.ndarray = np.log((launch + steps * step_ns + other) / measured)
        return errors

    solution = least_squares(
        lambda point: log_errors(point[0])[fitted], [START_NS], loss="soft_l1", f_scale=HUBER
    )
    step_ns = float(solution.x[0])
    errors = np.exp(log_errors(step_ns)) - 1
    windows = np.array([kernel.kernel.window > 1 for kernel in kernels])
    lines = ["| kernels | rows | median | bias |", "|---|---:|---:|---:|"]
    for name, rows in {
        "fitted to": fitted,
        "the other half": ~fitted,
        "of these, with windows": ~fitted & windows,
    }.items():
        lines.append(
            f"| {name} | {rows.sum()} | {np.median(abs(errors[rows])):.1%} | {errors[rows].mean():+.1%} |"
        )
    return step_ns, lines


def network_row(network: str, kernels: dict[tuple, MeasuredKernel], limits: KernelLimits) -> str:
    """A network's kernels by the tiles that were measured, and by those that are chosen now."""
    regions = extract_regions(frontend.load(network).module, network).regions
    measured = before = now = others = 0.0
    products = split = 0
    for kernel in (kernel for region in regions for kernel in gpu_kernels(region, "fp16")):
        known = kernels[_key(kernel)]
        measured += known.measured_ns
        if known.tile is None:
            others += known.measured_ns
            continue
        shape = product_shape(kernel)
        tile = fastest_tile(shape, limits)
        assert tile is not None
        products, split = products + 1, split + (tile.split > 1)
        before += product_ns(shape, known.tile, limits)
        # A graph has no launches between kernels; the time of kernels has none either.
        now += product_ns(shape, tile, replace(limits, launch_ns=0.0))
    inductor, ours = H100_US[network]
    return (
        f"| {network} | {inductor} | {ours or ''} | {measured / 1e3:.0f} | {(others + before) / 1e3:.0f} "
        f"| {(others + now) / 1e3:.0f} | {products} | {split} |"
    )


def counting_table(kernels: list[MeasuredKernel], gpu: GpuSpec) -> list[str]:
    """What the 3x3 convolutions of ResNet-50 did and do: bytes, products, warps and steps."""
    limits = gpu.kernel_limits("fp16")
    heads = (
        *("product", "measured, us", "of the bandwidth", "of the tensor cores"),
        *("tile", "warps of an SM", "steps", "modelled, us", "tile of now", "warps", "steps", "modelled, us"),
    )
    lines = [f"| {' | '.join(heads)} |", "|---|" + "---:|" * (len(heads) - 1)]
    for known in kernels:
        kernel = known.kernel
        if not (known.name.startswith("resnet-50/") and kernel.window == 9 and known.tile):
            continue
        shape = product_shape(kernel)
        moved = kernel.input_bytes + kernel.weight_bytes + kernel.output_bytes
        bandwidth = gpu.memory_channels * gpu.channel_bytes_per_ns
        multiplied = gpu.sms * gpu.fma_per_sm_cycle["fp16"] * gpu.clock_mhz / 1e3
        ns, chosen = known.measured_ns, fastest_tile(shape, limits)
        assert chosen is not None
        lines.append(
            f"| {shape.rows} x {shape.columns} x {shape.depth} | {ns / 1e3:.1f} "
            f"| {moved / bandwidth / ns:.0%} | {kernel.macs / multiplied / ns:.0%} "
            f"| {_tile_cells(shape, known.tile, limits)} | {_tile_cells(shape, chosen, limits)} |"
        )
    return lines


def _tile_cells(shape: ProductShape, tile: BlockTile, limits: KernelLimits) -> str:
    """A tile, warps that a multiprocessor has at once, steps of a block, and the time without launches."""
    blocks = tile.blocks(shape) / limits.multiprocessors
    warps = min(blocks, tile.resident(limits)) * prod(tile.warps)
    split = f", split {tile.split}" if tile.split > 1 else ""
    ns = product_ns(shape, tile, replace(limits, launch_ns=0.0))
    return (
        f"{tile.rows}x{tile.columns}x{tile.depth}{split} | {warps:.1f} | {tile.steps(shape)} | {ns / 1e3:.1f}"
    )


def _key(kernel: Kernel) -> tuple:
    return kernel.kind, *(getattr(kernel, size) for size in SIZES)


def main() -> None:
    """Read the arguments of the command line, and do what the top of this file says."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("measured", nargs="?", type=Path, metavar="CSV", default=DATA)
    parser.add_argument("--update", type=Path, metavar="PAGE")
    arguments = parser.parse_args()
    page, file_rows = arguments.update, list(csv.DictReader(arguments.measured.open()))
    kernels, gpu = kernel_measurements(file_rows), GpuSpec.load(file_rows[0]["gpu"])
    step_ns, errors = fit([kernel for kernel in kernels if kernel.tile], gpu.kernel_limits("fp16"))
    errors += ["", f"Fitted: {step_ns:.0f} ns a step."]
    if arguments.measured != DATA:  # the other tables are of the H200
        print("\n".join(errors))
        return
    h100 = GpuSpec.load("h100-sxm").kernel_limits("fp16")
    heads = (
        *("network", "PyTorch, measured", "ours, measured", "the same on an H200"),
        *("modelled, these tiles", "modelled, tiles of now", "products", "split-K"),
    )
    by_size = {_key(kernel.kernel): kernel for kernel in kernels}
    networks = [f"| {' | '.join(heads)} |", "|---|" + "---:|" * (len(heads) - 1)]
    networks += [network_row(network, by_size, h100) for network in H100_US]
    counted = counting_table(kernels, gpu)
    tables = {"product-tiles": errors, "product-counts": counted, "product-networks": networks}
    for name, lines in tables.items():
        print("\n".join(lines), end="\n\n")
        if page is not None:
            page.write_text(fill(page.read_text(), name, lines))


if __name__ == "__main__":
    main()
