"""What primitives in fp16 on tensor cores could gain on a GPU, by its model: ``price_half_primitives.py``.

There are none. Each launch of a primitive is priced as if it had one: half the bytes of fp32, products with
tiles of any size as those of the GPU's own convolutions. So the gain is an upper bound, layer by layer, of
the convolutions that have a choice.
"""

import argparse
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

import pimflow
from pimflow import frontend
from pimflow.commands.shared import prepare
from pimflow.core.kernel import Kernel, convolution_kernel
from pimflow.core.region import Region
from pimflow.hardware import GpuSpec
from pimflow.primitives.launches import launches, usable_primitives
from pimflow.simulators.gpu.model import kernel_cost

NETWORKS = ("alexnet", "vgg-16", "googlenet", "resnet-18", "squeezenet-1.1")
HEAD = ("network", "convolutions with a choice", "own kernels (us)", "best of both (us)", "gain", "in fp32")
HEAD += ("layers where a primitive is faster",)


def half_kernel(kernel: Kernel) -> Kernel:
    """A kernel of fp32 as if it stored fp16, with tiles of any size."""
    halves = {name: getattr(kernel, name) // 2 for name in ("input_bytes", "weight_bytes", "output_bytes")}
    return replace(kernel, **halves, tile=None)


def primitive_prices(region: Region, gpu: GpuSpec, dtype: str) -> dict[str, float]:
    """Times of a region's convolution in ns, by family; the GPU's own kernel is the ``operator``."""
    geometry = region.geometry
    if geometry is None:
        raise ValueError(f"{region.name} is no convolution")
    prices = {"operator": kernel_cost(convolution_kernel(geometry, dtype), gpu, dtype=dtype).total_ns}
    for primitive in usable_primitives(region):
        kernels = launches(primitive, geometry)
        kernels = [half_kernel(kernel) for kernel in kernels] if dtype == "fp16" else kernels
        price_ns = sum(kernel_cost(kernel, gpu, dtype=dtype).total_ns for kernel in kernels)
        prices[primitive.family] = min(price_ns, prices.get(primitive.family, price_ns))
    return prices


def row(name: str, gpu: GpuSpec) -> list[str]:
    """The cells of a network."""
    regions = [region for region in prepare.regions(frontend.load(name)).regions if usable_primitives(region)]
    own_ns, best_ns, faster = {}, {}, Counter[str]()
    for dtype in ("fp16", "fp32"):
        prices = [primitive_prices(region, gpu, dtype) for region in regions]
        own_ns[dtype] = sum(price["operator"] for price in prices)
        best_ns[dtype] = sum(min(price.values()) for price in prices)
        if dtype == "fp16":
            faster.update(min(price, key=lambda family: price[family]) for price in prices)
    del faster["operator"]
    gains = [f"{own_ns[dtype] / best_ns[dtype]:.3f} x" for dtype in ("fp16", "fp32")]
    families = ", ".join(f"{count} by {family}" for family, count in faster.items()) or "none"
    times = [f"{times_ns['fp16'] / 1e3:.1f}" for times_ns in (own_ns, best_ns)]
    return [name, str(len(regions)), *times, *gains, families]


def table(rows: Sequence[Sequence[str]]) -> str:
    """A table in Markdown."""
    return "\n".join(f"| {' | '.join(cells)} |" for cells in (HEAD, ["---"] * len(HEAD), *rows))


def main() -> None:
    """Print the table of the networks of the command line."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("networks", nargs="*", default=NETWORKS, help="default: %(default)s")
    gpu = pimflow.system().gpu
    print(table([row(name, gpu) for name in parser.parse_args().networks]))


if __name__ == "__main__":
    main()
