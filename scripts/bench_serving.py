"""A server under load, with PIM and on the GPU alone: ``bench_serving.py [--search] [--plot FILE]``.

Requests are drawn as `pimflow serve-sim` draws them, at rates that are shares of what the GPU alone gets done
with all requests there from the start. Costs of steps are those of `STEPS`, which ``--search`` makes anew: it
takes minutes a table, and may be interrupted, since each step that was searched is kept in the cache.
``update_results.py serving`` writes docs/serving.md anew from the stored tables in seconds.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Sequence
from pathlib import Path

from pimflow import Profiling, Serving, serve_sim, system
from pimflow.host import pictures
from pimflow.host.charts import COLOURS, chart
from pimflow.host.result_cache import ResultCache, default_path

STEPS = Path(__file__).parent / "serving_steps"
MODEL, PIM = "llama-3-8b", "newton-gddr6-narrow"
WEIGHT_TYPES = ("fp16", "q4_k")
LENGTHS = (512, 128)
LIMITS = {"context": 2048, "max_batch": 16, "chunk_tokens": 128, "assume_room": True}
RANDOM_POINTS = 16
LOADS = (0.25, 0.5, 0.75, 0.9, 1.0, 1.25, 1.5)  # of the throughput of the GPU alone
REQUESTS, MANY_REQUESTS = 2000, 100_000
ALL_AT_ONCE = 1e6  # requests a second
NAMES = ("GPU alone", "best published GPU", "with PIM")


def steps_file(weight_type: str) -> Path:
    """Where the costs of steps are stored."""
    return STEPS / f"{MODEL}_{weight_type}.json"


def serving(weight_type: str, rate: float, requests: int = REQUESTS) -> Serving:
    """A server at a load, by the stored costs of steps."""
    return serve_sim(
        MODEL,
        system=system(pim=PIM),
        weight_type=weight_type,
        steps=steps_file(weight_type),
        rate=rate,
        requests=requests,
        lengths=LENGTHS,
        **LIMITS,
    )


def search_steps(weight_type: str) -> None:
    """Search the costs of steps, and store them."""
    cache = ResultCache(default_path())
    searched = serve_sim(
        MODEL,
        system=system(pim=PIM),
        weight_type=weight_type,
        random_points=RANDOM_POINTS,
        rate=1.0,
        requests=10,
        lengths=LENGTHS,
        profiling=Profiling(cache=cache),
        progress=print,
        **LIMITS,
    )
    cache.close()
    STEPS.mkdir(exist_ok=True)
    searched.steps.save(steps_file(weight_type))


def servers(row: Serving) -> list:
    """Figures of the servers of `NAMES`; None for one that is not there."""
    return [row.gpu_only, row.gpu_published, row.planned]


def table(servings: Sequence[Serving]) -> str:
    """A row for each load, as Markdown."""
    lines = [
        "| requests a second | first token, p99, ms | a further token, p99, ms | between tokens, p99, ms "
        "| goodput a second | mJ a new token | caches in use, mean | most |",
        "|---:|---:|---:|---:|---:|---:|---:|---:|",
    ]
    for row in servings:
        cells = [f"{row.offered_per_s:.3f}"]
        figures = [entry for entry in servers(row) if entry]
        modelled = (row.gpu_only, row.planned)
        for name in ("ttft_ns", "tpot_ns", "itl_ns"):
            cells.append(" → ".join(f"{getattr(entry, name).p99 / 1e6:.1f}" for entry in figures))
        cells.append(" → ".join(f"{entry.goodput_per_s:.3f}" for entry in figures))
        cells.append(" → ".join(f"{entry.energy_per_token_pj / 1e9:.0f}" for entry in modelled))
        cells.append(" → ".join(f"{entry.mean_cache_share:.0%}" for entry in figures))
        cells.append(" → ".join(f"{entry.max_cache_share:.0%}" for entry in figures))
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def conditions(row: Serving) -> str:
    """What was served and how, in a paragraph."""
    limits = row.latency_limits
    sentences = (
        f"*{row.model}, weights {row.weights}, on {row.gpu} with {row.pim}*: {REQUESTS} requests, "
        f"{LENGTHS[0]} tokens of a prompt and {LENGTHS[1]} new ones on average, up to {row.max_batch} at "
        f"once, chunks of {row.chunk_tokens} tokens; {row.refused} of the requests are longer than the "
        f"context of {row.context}.",
        f"Goodput: first token within {limits.ttft_limit_ns / 1e6:g} ms, further ones within "
        f"{limits.tpot_limit_ns / 1e6:g} ms each.",
        f"Weights and full caches take {row.held_bytes / 2**30:.1f} GiB; PIM channels have "
        f"{row.room_bytes / 2**30:.1f} GiB{', and are assumed to have that' * row.assumes_room}.",
        f"Each cell: {' → '.join(NAMES)}; energy without the best published GPU, whose decoding moves bytes "
        f"at {row.gpu_published_source}.",
    )
    return "\n".join(sentences)


def error_table() -> str:
    """Errors of the stored tables at held-out steps, as Markdown."""
    lines = [
        "| weights | steps | points of the grid | held-out points | median error | largest error |",
        "|---|---|---:|---:|---:|---:|",
    ]
    for weight_type in WEIGHT_TYPES:
        steps = serving(weight_type, 1.0, 10).steps
        for kind, name, grid in (
            ("decode", "a token for several requests", steps.decode),
            ("chunk", "a chunk of a prompt", steps.chunks),
        ):
            errors = [step.relative_error for step in steps.held_out if step.kind == kind]
            lines.append(
                f"| {weight_type} | {name} | {len(grid.sizes)} x {len(grid.lengths)} | {len(errors)} "
                f"| {statistics.median(errors):.1%} | {max(errors):.1%} |"
            )
    return "\n".join(lines)


def many_requests(rate: float) -> str:
    """How long `MANY_REQUESTS` take, twice, and whether they give the same bytes."""
    texts, seconds = [], []
    for _ in range(2):
        begin = time.process_time()
        texts.append(json.dumps(serving(WEIGHT_TYPES[0], rate, MANY_REQUESTS).to_json()))
        seconds.append(f"{time.process_time() - begin:.1f}")
    same = "the same bytes both times" if texts[0] == texts[1] else "OTHER BYTES the second time"
    return (
        f"{MANY_REQUESTS} requests at {rate:.3f} a second, by the table of {WEIGHT_TYPES[0]}, served by "
        f"each of {', '.join(NAMES)}, each schedule checked: {' s and '.join(seconds)} s of CPU time, {same}."
    )


def picture(servings: dict[str, list[Serving]]) -> dict[str, object]:
    """p99 of the time of a further token, and goodput, over the load, as a chart of Vega-Lite."""
    points = [
        {
            "weights": weight_type,
            "rate": row.offered_per_s,
            "server": name,
            "tpot_ms": figures.tpot_ns.p99 / 1e6,
            "goodput": figures.goodput_per_s,
        }
        for weight_type, rows in servings.items()
        for row in rows
        for name, figures in zip(NAMES, servers(row))
        if figures
    ]
    colours = [COLOURS["baseline"], COLOURS["gpu"], COLOURS["pim"]]
    colour = {
        "field": "server",
        "scale": {"domain": list(NAMES), "range": colours},
        "legend": {"orient": "top", "title": None},
    }

    def panel(weight_type: str, field: str, title: str) -> dict[str, object]:
        """A panel with one line for each server."""
        return {
            "width": 300,
            "height": 200,
            "title": f"{MODEL}, {weight_type}",
            "transform": [{"filter": {"field": "weights", "equal": weight_type}}],
            "mark": {"type": "line", "point": True},
            "encoding": {
                "x": {"field": "rate", "type": "quantitative", "title": "requests a second"},
                "y": {"field": field, "type": "quantitative", "title": title},
                "color": colour,
            },
        }

    rows = [
        {
            "hconcat": [
                panel(weight_type, "tpot_ms", "a further token, p99, ms"),
                panel(weight_type, "goodput", "goodput, requests a second"),
            ]
        }
        for weight_type in servings
    ]
    return chart(data={"values": points}, vconcat=rows)


def main() -> None:
    """Read the arguments of the command line, and do what the top of this file says."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--search", action="store_true", help="search the costs of steps anew")
    parser.add_argument("--plot", metavar="FILE.svg")
    arguments = parser.parse_args()
    if arguments.search:
        for weight_type in WEIGHT_TYPES:
            search_steps(weight_type)
    print(error_table(), end="\n\n")
    servings = {}
    for weight_type in WEIGHT_TYPES:
        saturated = serving(weight_type, ALL_AT_ONCE).gpu_only.requests_per_s
        servings[weight_type] = [serving(weight_type, round(load * saturated, 4)) for load in LOADS]
        rows = servings[weight_type]
        print(conditions(rows[0]), table(rows), sep="\n\n", end="\n\n")
    rate = servings[WEIGHT_TYPES[0]][LOADS.index(0.75)].offered_per_s
    print(many_requests(round(rate, 4)))
    if arguments.plot:
        pictures.save(arguments.plot, picture(servings), "A server under load")


if __name__ == "__main__":
    main()
