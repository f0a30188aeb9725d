"""Traces for Accel-Sim of the kernels that the GPU model assumes.

A kernel is emitted as the model times it (`simulators.gpu.model.kernel_cost`): the same tile and split-K, the
same kernel for a single row, every operand read or written once, or gathered as by an implicit GEMM. Split-K
has two launches: the second adds the partial sums. A product that scales a map (squeeze and excitation) has
two as well, as `relay_passes.schedules.schedule_gpu.Reduce` generates them: the second passes over the map.

Size: a line has about 45 bytes, one that gathers up to 200. A GEMM has about 50 lines for 32x32x32 products
of a warp: 80 MB for a billion multiply-accumulates if tiles are full, several times that otherwise. A stream
has a quarter of a byte for each byte that it moves, a depthwise convolution the same for each tap.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pimflow.core.kernel import ConvGeometry, Kernel, convolution_kernel
from pimflow.errors import UsageError
from pimflow.hardware.gpu import GpuSpec
from pimflow.simulators.accel_sim.gemm import Gemm, gemm_launch
from pimflow.simulators.accel_sim.launch import ELEMENT, PARTIAL, Launch, Operands
from pimflow.simulators.accel_sim.simd import (
    SimdConvolution,
    Stream,
    depthwise_launch,
    gemv_launch,
    stream_launch,
)
from pimflow.simulators.accel_sim.trace import HostCopy, write_kernels_list
from pimflow.simulators.gpu.emitted import has_map_scaling
from pimflow.simulators.gpu.machine import KernelBatch
from pimflow.simulators.gpu.model import kernel_cost

if TYPE_CHECKING:
    from pimflow.simulators.gpu.model import KernelRequest

DTYPE = "fp16"  # what tensor cores take
KERNELS_LIST = "kernelslist.g"
REDUCE, SCALE = SECOND_LAUNCHES = ("_reduce", "_scale")  # suffixes of their names
_SIZES = (
    *("window", "stride", "groups", "macs", "operations", "multiplications"),
    *("input_bytes", "weight_bytes", "output_bytes"),
)
_TAGS = ("x", "t", "r", "macs", "ops", "muls", "in", "w", "out")

# Names that `kernel_name` returns. `parse_kernel_name` rejects others that match, such as with leading zeros.
_NAME = re.compile(
    r"(?P<kind>[a-z]+)"
    r"(_m(?P<gemm_m>\d+)_n(?P<gemm_n>\d+)_k(?P<gemm_k>\d+))?"
    r"(_(n(?P<n>\d+))?h(?P<h>\d+)w(?P<w>\d+)c(?P<c>\d+)o(?P<oc>\d+)(_f(?P<window>\d+x\d+))?"
    r"(_s(?P<stride>\d+x\d+))?(_d(?P<dilation>\d+x\d+))?(_p(?P<padding>-?\d+(x-?\d+){3}))?"
    r"(_g(?P<groups>\d+))?)?"
    + "".join(rf"(_{tag}(?P<of_{name}>\d+))?" for name, tag in zip(_SIZES, _TAGS))
    + r"_(?P<dtype>[a-z0-9]+)",
    re.ASCII,
)


def kernel_name(kernel: Kernel, dtype: str) -> str:
    """The unique name of a kernel in Accel-Sim's logs, such as ``gemm_m784_n192_k32_h28w28c32o192_fp16``.

    It lists the sizes, and what differs from a plain kernel.
    """
    words = [kernel.kind]
    if kernel.kind == "gemm" or kernel.m:
        words.append(f"m{kernel.m}_n{kernel.n}_k{kernel.k}")
    if kernel.geometry is None:
        # All other sizes follow: the name need not be short, but must be unique.
        default = Kernel(kind=kernel.kind, m=kernel.m, n=kernel.n, k=kernel.k, input_bytes=0, output_bytes=0)
    else:
        words.append(_geometry_name(kernel.geometry))
        default = convolution_kernel(kernel.geometry, dtype)
        if (default.kind, default.m, default.n, default.k) != (kernel.kind, kernel.m, kernel.n, kernel.k):
            raise UsageError(f"kernel '{words[0]}' is not that of its convolution {words[-1]}")
    for name, tag in zip(_SIZES, _TAGS):
        if getattr(kernel, name) != getattr(default, name):
            words.append(f"{tag}{getattr(kernel, name)}")
    return "_".join([*words, dtype])


def parse_kernel_name(name: str, dtype: str) -> Kernel | None:
    """The kernel whose `kernel_name` is `name`; None if there is none, or if it has another dtype.

    Fields that a name does not contain have their default values: one layer, no known tile.
    """
    match = _NAME.fullmatch(name)
    if match is None or match["dtype"] != dtype:
        return None
    numbers = {
        key: [int(n) for n in text.split("x")] for key, text in match.groupdict().items() if _is_number(text)
    }
    if "h" in numbers:
        fields: dict[str, Any] = {"n": 1}
        fields |= {key: numbers[key][0] for key in ("n", "h", "w", "c", "oc", "groups") if key in numbers}
        fields |= {key: tuple(numbers[key]) for key in ("stride", "dilation", "padding") if key in numbers}
        kh, kw = numbers.get("window", (1, 1))
        geometry = ConvGeometry(**fields, kh=kh, kw=kw)
        kernel = convolution_kernel(geometry, dtype)
    else:
        sizes: dict[str, Any] = {key: numbers[f"gemm_{key}"][0] for key in "mnk" if f"gemm_{key}" in numbers}
        kernel = Kernel(kind=match["kind"], input_bytes=0, output_bytes=0, **sizes)
    overrides: dict[str, Any] = {key: numbers[f"of_{key}"][0] for key in _SIZES if f"of_{key}" in numbers}
    kernel = dataclasses.replace(kernel, **overrides)
    try:
        return kernel if kernel_name(kernel, dtype) == name else None
    except UsageError:
        return None


def _is_number(text: str | None) -> bool:
    """Whether a field of a name holds numbers."""
    return text is not None and (text[0].isdigit() or text[0] == "-")


def _geometry_name(geometry: ConvGeometry) -> str:
    g = geometry
    words = [f"n{g.n}" if g.n > 1 else "", f"h{g.h}w{g.w}c{g.c}o{g.oc}"]
    pairs: list[tuple[str, tuple[int, ...], tuple[int, ...]]]
    pairs = [("f", (g.kh, g.kw), (1, 1)), ("s", g.stride, (1, 1)), ("d", g.dilation, (1, 1))]
    pairs += [("p", g.padding, (0, 0, 0, 0)), ("g", (g.groups,), (1,))]
    words += [
        "_" + tag + "x".join(map(str, value)) for tag, value, default in pairs if tuple(value) != default
    ]
    return "".join(words)


def launches(
    kernel: Kernel, gpu: GpuSpec, dtype: str, channels: int | None = None, listed: bool = False
) -> list[Launch]:
    """The grid launches of a kernel, two with split-K or a map to scale, as the GPU model would run it.

    The choice of tile depends on the memory `channels`, all by default. Addresses are written as strides or
    differences, or, if `listed`, one by one.

    Raises
    ------
    UsageError
        If `dtype` is not fp16, or the kernel's convolution is not known.
    """
    if dtype != DTYPE:
        raise UsageError(f"traces for Accel-Sim are of {DTYPE} kernels, for tensor cores; not of {dtype}")
    name = kernel_name(kernel, dtype)
    if kernel.kind == "stream":
        return [_stream(name, kernel, listed)]
    geometry = _geometry(kernel, name)
    base = convolution_kernel(geometry, dtype)
    residual = max(0, kernel.input_bytes - base.input_bytes)
    cost = kernel_cost(kernel, gpu, dtype=dtype, channels=channels)
    split = cost.tile[2] if cost.tile else 1
    apart = split > 1 or has_map_scaling(KernelBatch([kernel]), ELEMENT).item()
    partial = split * geometry.pixels * geometry.oc * PARTIAL if apart else 0
    whole_input = geometry.n * geometry.h * geometry.w * geometry.c * ELEMENT
    sizes = (whole_input, base.weight_bytes, kernel.output_bytes, residual, partial)
    bases = Operands(sizes).bases
    inputs = [(bases[i], sizes[i]) for i in (0, 1, 3)]
    bases_by_name = dict(zip(("input_base", "weight_base", "output_base", "residual_base"), bases))
    bases_by_name["output_base"] = bases[4 if apart else 2]
    epilogue = {"residual_bytes": residual, "result_bytes": kernel.output_bytes, "apart": apart}
    common: dict[str, Any] = {"geometry": geometry, "listed": listed, **epilogue, **bases_by_name}
    if cost.tile is None:
        emit = depthwise_launch if kernel.kind == "depthwise" else gemv_launch
        first = emit(name, SimdConvolution(**common))
    else:
        first = gemm_launch(name, Gemm(tile=cost.tile[:2], split=split, **common))
    first = _with_inputs(first, inputs)
    if not apart:
        return [first]
    # The residual or map is read right after the sums: its address does not matter for time.
    second = Stream(
        read_base=bases[4],
        write_base=bases[2],
        read_bytes=partial + residual,
        write_bytes=kernel.output_bytes,
        macs=max(split * geometry.pixels * geometry.oc, kernel.output_bytes // ELEMENT),
        listed=listed,
    )
    return [first, stream_launch(name + (REDUCE if split > 1 else SCALE), second)]


def _stream(name: str, kernel: Kernel, listed: bool) -> Launch:
    sizes = (kernel.input_bytes + kernel.weight_bytes, kernel.output_bytes)
    read, write = Operands(sizes).bases
    stream = Stream(
        read_base=read,
        write_base=write,
        read_bytes=sizes[0],
        write_bytes=sizes[1],
        macs=max(kernel.macs, kernel.operations),
        listed=listed,
    )
    return _with_inputs(stream_launch(name, stream), [(read, sizes[0])])


def _geometry(kernel: Kernel, name: str) -> ConvGeometry:
    """Geometry of the kernel's convolution, or of one with the same products."""
    if kernel.convolution is None:
        raise UsageError(f"kernel '{name}': a trace needs its convolution, which it does not say")
    return kernel.convolution


def _with_inputs(launch: Launch, inputs: Sequence[tuple[int, int]]) -> Launch:
    return dataclasses.replace(launch, inputs=tuple(HostCopy(base, size) for base, size in inputs if size))


@dataclass(frozen=True, kw_only=True)
class KernelTrace:
    """The trace of a kernel on disk.

    Attributes
    ----------
    directory : str
        Name of the directory with ``kernelslist.g`` and a ``.traceg`` for each launch.
    launches : tuple of str
        Names in Accel-Sim's log, in order.
    instructions : tuple of int
        Instructions of each launch, as Accel-Sim counts them.
    """

    name: str
    directory: str
    launches: tuple[str, ...]
    instructions: tuple[int, ...]
    files_bytes: dict[str, int]


def write_kernel(
    kernel: Kernel, gpu: GpuSpec, dtype: str, channels: int, directory: Path, copies: bool = False
) -> KernelTrace:
    """Write ``kernelslist.g`` and the traces of a kernel into an existing, empty directory.

    Parameters
    ----------
    copies : bool
        Whether the list names the tensors that the host has copied to the GPU. Accel-Sim then begins with
        them in the L2; the GPU model, and the runs that it was fitted to, begin with an empty L2.
    """
    grid_launches = launches(kernel, gpu, dtype, channels)
    counts, files = [], {}
    for number, launch in enumerate(grid_launches, 1):
        path = directory / f"kernel-{number}.traceg"
        instructions = 0
        with path.open("w", encoding="ascii", newline="\n") as file:
            file.write(str(launch.header(number)))
            for text, lanes in launch.blocks():
                file.write(text)
                instructions += lanes
        counts.append(instructions)
        files[path.name] = path.stat().st_size
    inputs = [copy for launch in grid_launches for copy in launch.inputs] if copies else []
    write_kernels_list(directory / KERNELS_LIST, [*inputs, *files])
    files[KERNELS_LIST] = (directory / KERNELS_LIST).stat().st_size
    return KernelTrace(
        name=grid_launches[0].name,
        directory=directory.name,
        launches=tuple(launch.name for launch in grid_launches),
        instructions=tuple(counts),
        files_bytes=files,
    )


def write_traces(
    requests: Sequence[KernelRequest],
    gpu: GpuSpec,
    dtype: str,
    directory: Path,
    progress: Callable[[float], None] = lambda _: None,
) -> list[KernelTrace]:
    """Write the trace of every kernel, for its number of memory channels, into an existing directory.

    Each trace is a directory ``<kernel name>.<channels>``. The log of its run has to be called
    ``<kernel name>.<channels>.log``.

    Parameters
    ----------
    progress : callable
        Called with the share that is done.

    Raises
    ------
    UsageError
        If a kernel cannot be emitted.
    """
    traces = []
    for index, request in enumerate(requests):
        progress(index / len(requests))
        target = directory / f"{kernel_name(request.kernel, dtype)}.{request.channels}"
        target.mkdir()
        traces.append(write_kernel(request.kernel, gpu, dtype, request.channels, target))
    progress(1.0)
    return traces
