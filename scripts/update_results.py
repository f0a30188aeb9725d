"""Write the tables of docs/results.md and of pages beside it (`PAGES`): ``update_results.py [NAME…]``.

The pages name the scripts that print them.
"""

import argparse
from pathlib import Path

from update_readme import ROOT, fill, output

# By how the name of a table begins.
PAGES = {
    "occamy": "results_occamy.md",
    "temco": "results_temco.md",
    "devices": "devices_compared.md",
    "memory": "memory.md",
    "decomposition": "decomposition.md",
    "serving": "serving.md",
    "narrow": "results_narrow.md",
    "taso": "results_taso.md",
}
INSTANCES = "memory-instances"  # in a folder that is not part of the repository
FUSED = (
    *("mobilenet-v1", "mobilenet-v2", "mnasnet-1.0", "efficientnet-b0", "squeezenet-1.1", "resnet-18"),
    *("resnet-50", "googlenet", "vgg-16"),
)
COMPILED = ("efficientnet-b0", "resnet-50", "googlenet", "yolov1", "efficientnet-b6", "inception-v3")
TABLES = {
    "pools": ("bench_memory.py", "--zoo"),
    "occamy-memory": ("reproduce_occamy.py", "--parts", "counts,memory"),
    "occamy-ahead": ("reproduce_occamy.py", "mobilenet-v1", "resnet-50", "--parts", "ahead,chosen"),
    "occamy-times": ("reproduce_occamy.py", "--parts", "times"),
    "copies": ("compare_networks.py", "--copies"),
    "fuse": ("compare_networks.py", "--fuse", *FUSED),
    "fuse-seconds": ("bench_compile.py", "mobilenet-v2", "resnet-50", "--fuse"),
    "choices": ("compare_choices.py",),
    "decomposition-pays": ("compare_choices.py", "--pays"),
    INSTANCES: ("bench_memory.py", "--seconds", "15"),
    "memory-orders": ("bench_memory.py", "--reorder", "--seconds", "10"),
    "compile-zoo": ("bench_compile.py", "--zoo", *COMPILED),
    "compile-growth": ("bench_compile.py", "--growth"),
    "cpu": ("bench_cpu.py",),
    "modes": ("verify_modes.py",),
    "sensitivity": ("sensitivity.py",),
    "sharing": ("compare_sharing.py", "--counts", "16,32"),
    "serving": ("bench_serving.py", "--plot", "docs/serving.svg"),
    "devices-means": ("compare_devices.py", "means"),
    "devices-launches": ("compare_devices.py", "launches"),
    "devices-bounds": ("compare_devices.py", "bounds", "--pims", "newton-gddr6,aim-gddr6"),
    "devices-energies": ("compare_devices.py", "energies", "--pims", "aim-gddr6"),
    "devices-fastest": ("compare_devices.py", "fastest"),
    "devices-frugal": ("compare_devices.py", "frugal"),
    **{
        f"narrow-{name}": ("compare_published_narrow.py", name)
        for name in ("lpddr5x", "registers", "phone", "groups")
    },
    "narrow-caches": ("bench_caches.py",),
    "narrow-roundings": ("narrow_roundings.py",),
    "narrow-p3": ("compare_published_narrow.py", "p3"),
    "taso-half": ("price_half_primitives.py",),
    "temco-memory": ("reproduce_temco.py", "--parts", "memory,equations,over-time"),
    "temco-times": ("reproduce_temco.py", "--parts", "times"),
    "temco-passes": ("reproduce_temco_accuracy.py", "--passes"),
    "temco-unet": ("reproduce_temco_accuracy.py", "--passes", "--networks", "glyphs-unet", "tucker:0.5"),
    "temco-accuracy": ("reproduce_temco_accuracy.py", "--plot", "docs/temco_accuracy.svg"),
}


def page_of(name: str) -> Path:
    """The page that has a table."""
    return ROOT / "docs" / PAGES.get(name.partition("-")[0], "results.md")


def main() -> None:
    """Read the arguments of the command line, and do what the top of this file says."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(TABLES)} (default: all)")
    parser.add_argument(
        "--instances", metavar="DIR", help=f"for {INSTANCES}: MiniMalloc's benchmarks; without, it stays"
    )
    args = parser.parse_args()
    names = args.names or [name for name in TABLES if args.instances or name != INSTANCES]
    if INSTANCES in names and not args.instances:
        parser.error(f"{INSTANCES} needs --instances DIR")
    if unknown := set(names) - set(TABLES):
        parser.error(f"unknown: {', '.join(sorted(unknown))}; there are {', '.join(TABLES)}")
    for name in names:
        extra = (args.instances,) if name == INSTANCES else ()
        body = output(*TABLES[name], *extra)  # before reading the page, which may change meanwhile
        page = page_of(name)
        page.write_text(fill(page.read_text(encoding="utf-8"), name, body), encoding="utf-8")


if __name__ == "__main__":
    main()
