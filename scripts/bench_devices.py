"""A large model with narrow weights end to end, on one device and on four: ``bench_devices.py [--write]``.

A block of each kind runs by value and is verified against the reference; times, energy, bound and memory are
of all blocks and the output layer. ``--write`` replaces the table of docs/language_models.md.
"""

import argparse
from pathlib import Path

from bench_generate import best_gpu_cell
from configurations import fill

from pimflow import Generation, Profiling, generate, system
from pimflow.host.result_cache import ResultCache, default_path

PAGE = Path(__file__).parent.parent / "docs" / "language_models.md"
MODEL, WEIGHTS, PIM, CHANNELS, CONTEXT = "llama-3-8b", "q4_k", "newton-gddr6-narrow", 32, 1024
DEVICES = ((1, "pipeline"), (4, "pipeline"), (4, "tensor"))
HEAD = (
    "| devices | best GPU, ms | GPU alone, ms | plan, ms | tokens/s | mJ a token | in PIM, of the fullest "
    "| room | of the bound | error | timing violations |",
    "|---|---|---|---|---|---|---|---|---|---|---|",
)


def line(generation: Generation, devices: str) -> str:
    """A row of the table as Markdown."""
    full = generation.full_cache
    cells = (
        devices,
        best_gpu_cell(full.tpot_ns_gpu_published, full.tpot_ns),
        f"{full.tpot_ns_gpu_only / 1e6:.2f}",
        f"{full.tpot_ns / 1e6:.2f} ({full.tpot_ns_gpu_only / full.tpot_ns:.2f}x)",
        f"{1e9 / full.tpot_ns:.0f}",
        f"{full.energy_per_token_pj_gpu_only / 1e9:.0f} → {full.energy_per_token_pj / 1e9:.0f}",
        f"{generation.held_bytes / 2**30:.1f} GiB",
        f"{generation.room_bytes / 2**30:.1f} GiB",
        f"{full.fraction_of_bound:.0%}",
        f"{generation.max_relative_error:.1e}",
        str(generation.timing_violations),
    )
    return f"| {' | '.join(cells)} |"


def main() -> None:
    """Read the arguments of the command line, and do what the top of this file says."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--write", action="store_true", help="write docs/language_models.md anew")
    arguments = parser.parse_args()
    cache, lines = ResultCache(default_path()), [*HEAD]
    print(*HEAD, sep="\n", flush=True)
    for count, parallel in DEVICES:
        generation = generate(
            MODEL,
            tokens=[1, 2, 3],
            n=2,
            context=CONTEXT,
            weight_type=WEIGHTS,
            devices=count,
            parallel=parallel,
            system=system(pim=PIM, pim_channels=CHANNELS),
            profiling=Profiling(cache=cache),
        )
        lines.append(line(generation, f"{count}, {parallel}" if count > 1 else "1"))
        print(lines[-1], flush=True)
    cache.close()
    if arguments.write:
        PAGE.write_text(fill(PAGE.read_text("utf-8"), "devices", "\n".join(lines)), "utf-8")


if __name__ == "__main__":
    main()
