"""Decoding with narrow weights, activations and caches: time, energy, memory, and the share of the bound.

    bench_caches.py [MODELS…] [--contexts TOKENS…] [--systems NAMES…]

A block and the output layer are searched over full caches, and figures are those of all blocks. It prints a
table of docs/results_narrow.md, which `update_results.py narrow-caches` writes.
"""

import argparse

from bench_narrow import decoding
from papers.pimflow_tables import markdown

from pimflow import system, zoo
from pimflow.host.result_cache import ResultCache, default_path
from pimflow.placement import Profiling
from pimflow.placement.solvers.capacity import channel_bytes

MODELS = ("llama-3-8b",)
CONTEXTS = (2048, 8192)
# By name of a design, its types of weights, activations and caches. Without operands of small integers for
# both, as on newton-gddr6-narrow, activations stay fp16.
INTEGERS = {
    "W4A16": ("int4", "fp16", "fp16"),
    "W4A8": ("int4", "int8", "fp16"),
    "W4A8KV8": ("int4", "int8", "int8"),
    "W4A8KV4": ("int4", "int8", "int4"),
}
BLOCKS = {
    "W4A16": ("q4_0", "fp16", "fp16"),
    "W4A16KV8": ("q4_0", "fp16", "int8"),
    "W4A16KV4": ("q4_0", "fp16", "int4"),
}
SYSTEMS = {
    "phone": (system("phone"), INTEGERS),
    "phone, lpddr6-pim": (system("phone", pim="lpddr6-pim"), INTEGERS),
    "newton-gddr6-narrow": (system(pim="newton-gddr6-narrow"), BLOCKS),
}
HEAD = [
    *("model", "tokens", "system", "types", "GPU alone, ms", "plan, ms", "tokens/s", "mJ a token"),
    *("cache, B a token", "in PIM", "of the bound"),
]


def row(model: str, context: int, name: str, types: str, profiling: Profiling) -> list[str]:
    """A row of the table."""
    target, designs = SYSTEMS[name]
    decoder = zoo.decoder(model).with_types(*designs[types])
    step = decoding(decoder, target, context, profiling)
    costs = step.costs
    room = "" if step.held_bytes <= channel_bytes(target) else ", no room"
    return [
        *(model, str(context), name, types),
        f"{costs.ns_gpu_only / 1e6:.2f}",
        f"{costs.ns / 1e6:.2f} ({costs.ns_gpu_only / costs.ns:.2f}x)",
        f"{1e9 / costs.ns:.1f}",
        f"{costs.pj_gpu_only / 1e9:.0f} → {costs.pj / 1e9:.0f}",
        str(decoder.kv_bytes_per_token()),
        f"{step.held_bytes / 2**30:.1f} GiB{room}",
        f"{step.bound_ns / costs.ns:.0%}",
    ]


def main() -> None:
    """Read the arguments of the command line, and do what the top of this file says."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("models", nargs="*", metavar="MODELS")
    parser.add_argument("--contexts", nargs="+", type=int, default=CONTEXTS)
    parser.add_argument("--systems", nargs="+", default=tuple(SYSTEMS), choices=SYSTEMS)
    arguments = parser.parse_args()
    cache = ResultCache(default_path())
    rows = [
        row(model, context, name, types, Profiling(cache=cache))
        for model in arguments.models or MODELS
        for context in arguments.contexts
        for name in arguments.systems
        for types in SYSTEMS[name][1]
    ]
    cache.close()
    print(markdown(HEAD, rows))


if __name__ == "__main__":
    main()
