"""The figures of docs/primitives.md: ``bench_primitives.py [pools|gpu|c …] [--page]``; all parts by default.

Prints tables in Markdown; ``--page`` writes those of docs/primitives.md. ``pools`` and ``c`` are measured on
this machine, ``c`` on one core, beside LLVM's code; ``gpu`` is the model's, the same on every machine.
"""

import argparse
import contextlib
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace

import tvm
from tvm import tirx
from update_readme import ROOT, fill

import pimflow
from pimflow.compiler.c_code import builds, kernels
from pimflow.core.kernel import ConvGeometry
from pimflow.errors import InfeasibleError
from pimflow.host.files import replace_file
from pimflow.placement import SearchResult
from pimflow.placement.solvers.plan_memory import PlanMemory
from pimflow.primitive_selection.machines import Machine, thread_count
from pimflow.primitive_selection.measuring import pooling_kernel, timers
from pimflow.primitive_selection.profile import Pooling
from pimflow.primitives import PRIMITIVES
from pimflow.primitives.kernels.prim_func import kernel
from pimflow.primitives.layer import LAYOUTS

PAGE = ROOT / "docs" / "primitives.md"
POOL_CALLS, C_CALLS, RUNS = 150, 25, 15  # the minimum of calls counts; of a network's runs the median
MIB = 2**20

SAME, CEILED, NONE = (1, 1, 1, 1), (0, 0, 1, 1), (0, 0, 0, 0)  # padding
GOOGLENET_POOLS = (  # operator, height and width, channels, window, stride, padding
    ("nn.max_pool2d", 112, 64, 3, 2, CEILED),
    ("nn.max_pool2d", 28, 192, 3, 1, SAME),
    ("nn.max_pool2d", 14, 512, 3, 1, SAME),
    ("nn.max_pool2d", 14, 832, 2, 2, NONE),
    ("mean", 7, 1024, 1, 1, NONE),
)
SELECTED, GPUS = "resnet-18", ("rtx-2060-pim32", "v100")
PLANNED = (  # networks, and the MiB that plans may take
    *(("resnet-18", None), ("resnet-18", 5), ("resnet-18", 4)),
    *(("mobilenet-v2", None), ("squeezenet-1.1", None)),
)

LAYER = ConvGeometry(n=1, h=28, w=28, c=128, oc=128, kh=3, kw=3, padding=SAME)
IN_C = (
    ("3 x 3", LAYER, "winograd-2d-f4-hwc-7x32 mec-hwc-7x32 direct-hwc-7x32 kn2col-accumulating-hwc-7x32"),
    ("3 x 3", LAYER, "im2row-hwc-7x32 direct-chw-14x32 direct-chwc16-7x16 im2col-chw-14x32"),
    ("3 x 3", LAYER, "winograd-2d-f4-chw-14x16 kn2row-accumulating-chw-14x16"),
    ("1 x 1", replace(LAYER, kh=1, kw=1, padding=NONE), "pointwise-hwc-7x32 direct-chwc16-7x16"),
    ("3 x 3, depthwise", replace(LAYER, groups=128), "depthwise-hwc-4x32 depthwise-chw-1x16"),
)
C_NETWORK, C_MEASURE = "mobilenet-v2", 2  # primitives of each layer


def table(header: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """A Markdown table."""
    lines = [f"| {' | '.join(map(str, line))} |" for line in (header, *rows)]
    return "\n".join([lines[0], "|" + "---|" * len(header), *lines[1:]])


def min_ns(function: tirx.PrimFunc, machine: Machine, calls: int) -> float:
    """Minimum time of calls of a kernel, compiled as in a network; only its input is in the caches."""
    (time_ns,) = timers([function], machine)
    return min(time_ns(calls))


def pools(calls: int | None) -> str:
    """Times of the pools of GoogLeNet in every layout."""
    machine, calls, rows = Machine(), calls or POOL_CALLS, []
    for operator, size, channels, window, stride, padding in GOOGLENET_POOLS:
        sides = {"kh": window, "kw": window, "stride": (stride, stride), "padding": padding}
        geometry = ConvGeometry(n=1, h=size, w=size, c=channels, oc=channels, groups=channels, **sides)
        label = "mean" if operator == "mean" else f"{window} x {window}, stride {stride}"
        functions = (
            pooling_kernel(Pooling(operator=operator, window=geometry), layout) for layout in LAYOUTS
        )
        times = [f"{min_ns(function, machine, calls) / 1e3:.1f}" for function in functions]
        rows.append([f"{label}, {size} x {size} x {channels}", *times])
    head = f"In microseconds, the least of {calls} calls, on {machine.device.name}:"
    return f"{head}\n\n{table(('pool', *LAYOUTS), rows)}"


def selections(_: int | None) -> str:
    """Selections of primitives for modelled GPUs, beside operators alone."""
    rows = []
    for gpu in GPUS:
        selection = pimflow.select(SELECTED, device="cuda", gpu=gpu)
        times_by_key = selection.profile.times_ns
        times_ns = {key: times_by_key[key] for key in times_by_key if PRIMITIVES[key[0]].family == "operator"}
        operators = replace(selection.profile, times_ns=times_ns)
        operators_only = pimflow.select(SELECTED, device="cuda", gpu=gpu, profile=operators)
        families = Counter(primitive.family for primitive in selection.choices.values())
        sums = (selection.selected.sums, operators_only.selected.sums)
        pairs = [(f"{total.time_ns / 1e6:.2f}", f"{total.memory_bytes / MIB:.1f}") for total in sums]
        rows.append([gpu, *sum(pairs, ()), ", ".join(f"{name} {n}" for name, n in sorted(families.items()))])
    header = ("GPU", "selected, ms", "MiB", "operators alone, ms", "MiB", "layers of each family selected")
    return f"{SELECTED}:\n\n{table(header, rows)}"


def fastest_plan(network: str, budget: int | None, **goal: object) -> SearchResult | None:
    """The fastest plan within a budget, if there is one."""
    goal |= {"max_memory_bytes": budget and budget * MIB}
    try:
        return pimflow.search(network, pimflow.system(dtype="fp32"), **goal)
    except InfeasibleError:
        return None


def plans(_: int | None) -> str:
    """Times of plans: operators alone and with primitives, the GPU alone and with PIM."""
    rows = []
    for network, budget in PLANNED:
        columns = [{"modes": "gpu"}, {}, {"modes": "gpu", "primitives": True}, {"primitives": True}]
        search_results = [fastest_plan(network, budget, **goal) for goal in columns]
        times = [f"{entry.evaluation.latency_ns / 1e3:.1f}" if entry else "none" for entry in search_results]
        last = ["none", "none"]
        if plan := search_results[-1]:
            regions = sum(len(entry.covers) for entry in plan.candidates if entry.uses_pim)
            memory_bytes = PlanMemory(plan.graph, "fp32").pool_bytes(plan.candidates)
            last = [f"{memory_bytes / MIB:.1f}", str(regions)]
        rows.append([network, budget or "any", *times, *last])
    columns = [
        f"{placement}, {algorithms}"
        for algorithms in ("operators", "primitives")
        for placement in ("GPU only", "plan")
    ]
    return table(["network", "budget, MiB", *columns, "takes, MiB", "regions on PIM"], rows)


@contextlib.contextmanager
def one_thread() -> Iterator[None]:
    """Run TVM's kernels on one core until the block ends."""
    configure, before = tvm.get_global_func("runtime.config_threadpool"), thread_count()
    configure(1, 1)
    try:
        yield
    finally:
        configure(1, before)


@one_thread()
def c_primitives(calls: int | None) -> str:
    """Times of primitives as C code and as LLVM's, on one core."""
    calls, rows = calls or C_CALLS, []
    machines = (Machine(tvm.target.Target(kernels.TARGET)), Machine())
    for layer, geometry, names in IN_C:
        for name in names.split():
            function = kernel(PRIMITIVES[name], geometry)
            times = [f"{min_ns(function, machine, calls) / 1e6:.3f}" for machine in machines]
            rows.append([layer, f"`{name}`", *times])
    compiler = f"{builds.require_compiler().version} `{' '.join(builds.OPTIONS)}`"
    head = f"The least of {calls} calls, on {machines[1].device.name}; C by {compiler}:"
    return f"{head}\n\n{table(('layer', 'primitive', 'C, ms', 'LLVM, ms'), rows)}"


@one_thread()
def c_network(calls: int | None) -> str:
    """Times of C code with and without selected primitives; without them also of LLVM's code."""
    runs, rows = calls or RUNS, []
    for options, select in (
        (f"--select --measure {C_MEASURE}", {"measure": C_MEASURE}),
        ("no --select", None),
    ):
        with tempfile.TemporaryDirectory() as folder:
            pimflow.compile(C_NETWORK, folder, target="c", select=select, conventions="none")
            for target in ("c",) if select else ("c", "llvm+pim"):
                median_ns = pimflow.infer(folder, target=target, repeat=runs).median_ns
                rows.append([f"`{target}`", f"`{options}`" if select else options, f"{median_ns / 1e6:.1f}"])
    head = f"{C_NETWORK} on one core, the median of {runs} runs:"
    return f"{head}\n\n{table(('target', 'primitives', 'ms'), rows)}"


PARTS: dict[str, dict[str, Callable[[int | None], str]]] = {  # the marks of the page
    "pools": {"pools": pools},
    "gpu": {"gpu-selection": selections, "gpu-plans": plans},
    "c": {"c-primitives": c_primitives, "c-network": c_network},
}


def main() -> None:
    """Read the arguments of the command line, and do what the top of this file says."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("parts", nargs="*", metavar="PART", help=f"{', '.join(PARTS)} (default: all)")
    parser.add_argument("--calls", type=int, help="of whatever is measured, in place of the usual ones")
    parser.add_argument("--page", action="store_true", help="write docs/primitives.md")
    args = parser.parse_args()
    if unknown := set(args.parts) - set(PARTS):
        parser.error(f"unknown part '{min(unknown)}': give some of {', '.join(PARTS)}")
    for part in args.parts or PARTS:
        for name, write in PARTS[part].items():
            print(f"bench_primitives: {name}", file=sys.stderr, flush=True)
            text = write(args.calls)
            print(f"{name}\n\n{text}\n", flush=True)
            if args.page:
                page = PAGE.read_text(encoding="utf-8")
                replace_file(PAGE, fill(page, name, text).encode())


if __name__ == "__main__":
    main()
