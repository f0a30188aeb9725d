"""A server under load, with PIM and on the GPU alone: ``bench_serving.py [MODEL] [--plot FILE]``.

Requests are drawn as `pimflow serve-sim` draws them, at rates that are shares of what the GPU alone gets done
with all requests there from the start. ``update_results.py serving`` writes docs/serving.md anew.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from functools import partial

from pimflow import Profiling, Serving, serve_sim, system
from pimflow.host import pictures
from pimflow.host.charts import COLOURS, chart
from pimflow.host.result_cache import ResultCache, default_path

LOADS = (0.25, 0.5, 0.75, 0.9, 1.0, 1.25, 1.5)  # of the throughput of the GPU alone
REQUESTS = 2000
ALL_AT_ONCE = 1e6  # requests a second
NAMES = ("GPU alone", "with PIM")


def table(servings: Sequence[Serving]) -> str:
    """A row for each load, as Markdown."""
    lines = [
        "| requests a second | first token, p99, ms | a further token, p99, ms | between tokens, p99, ms "
        "| goodput a second | mJ a new token | caches in use, most |",
        "|---:|---:|---:|---:|---:|---:|---:|",
    ]
    for serving in servings:
        both = (serving.gpu_only, serving.planned)
        cells = [f"{serving.offered_per_s:.2f}"]
        for name in ("ttft_ns", "tpot_ns", "itl_ns"):
            cells.append(" → ".join(f"{getattr(figures, name).p99 / 1e6:.2f}" for figures in both))
        cells.append(" → ".join(f"{figures.goodput_per_s:.2f}" for figures in both))
        cells.append(" → ".join(f"{figures.energy_per_token_pj / 1e9:.1f}" for figures in both))
        cells.append(" → ".join(f"{figures.max_cache_share:.0%}" for figures in both))
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def conditions(serving: Serving, lengths: str) -> str:
    """What was served and how, in a paragraph."""
    steps, limits = serving.step_table, serving.latency_limits
    prompt, new = lengths.split(",")
    sentences = (
        f"{serving.model} on {serving.gpu} with {serving.pim}, {serving.dtype}: {REQUESTS} requests, "
        f"{prompt} tokens of a prompt and {new} new ones on average, up to {serving.max_batch} at once, "
        f"chunks of {serving.chunk_tokens} tokens.",
        f"Goodput: first token within {limits.ttft_limit_ns / 1e6:g} ms, further ones within "
        f"{limits.tpot_limit_ns / 1e6:g} ms each.",
        f"The step table is within {steps.max_relative_error:.1%} at {steps.held_out_points} held-out "
        "points.",
        f"Weights and full caches take {serving.held_bytes / 2**30:.1f} GiB; PIM channels have "
        f"{serving.room_bytes / 2**30:.1f} GiB{', and are assumed to have that' * serving.assumes_room}.",
        "Each cell: GPU alone → with PIM.",
    )
    return "\n".join(sentences)


def picture(servings: Sequence[Serving]) -> dict[str, object]:
    """p99 of the time of a further token, and goodput, over the load, as a chart of Vega-Lite."""
    points = [
        {
            "rate": serving.offered_per_s,
            "server": name,
            "tpot_ms": figures.tpot_ns.p99 / 1e6 if figures.tpot_ns else None,
            "goodput": figures.goodput_per_s,
        }
        for serving in servings
        for name, figures in zip(NAMES, (serving.gpu_only, serving.planned))
    ]
    colour = {
        "field": "server",
        "scale": {"domain": list(NAMES), "range": [COLOURS["baseline"], COLOURS["pim"]]},
        "legend": {"orient": "top", "title": None},
    }

    def panel(field: str, title: str) -> dict[str, object]:
        """A panel with one line for each server."""
        return {
            "width": 300,
            "height": 220,
            "mark": {"type": "line", "point": True},
            "encoding": {
                "x": {"field": "rate", "type": "quantitative", "title": "requests a second"},
                "y": {"field": field, "type": "quantitative", "title": title},
                "color": colour,
            },
        }

    panels = [
        panel("tpot_ms", "a further token, p99, ms"),
        panel("goodput", "goodput, requests a second"),
    ]
    return chart(data={"values": points}, hconcat=panels)


def main() -> None:
    """Read the arguments of the command line, and do what the top of this file says."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("model", nargs="?", default="gpt-2")
    parser.add_argument("--pim", default="aim-gddr6", help="default: %(default)s")
    parser.add_argument("--lengths", default="128,64", help="mean tokens of prompt and answer: %(default)s")
    parser.add_argument("--context", type=int, default=512, help="default: %(default)s")
    parser.add_argument("--max-batch", type=int, default=8, help="default: %(default)s")
    parser.add_argument("--chunk-tokens", type=int, default=128, help="default: %(default)s")
    parser.add_argument("--assume-room", action="store_true")
    parser.add_argument("--plot", metavar="FILE.svg")
    arguments = parser.parse_args()
    cache = ResultCache(default_path())
    serve_at = partial(
        serve_sim,
        arguments.model,
        system=system(pim=arguments.pim),
        requests=REQUESTS,
        lengths=tuple(int(tokens) for tokens in arguments.lengths.split(",")),
        context=arguments.context,
        max_batch=arguments.max_batch,
        chunk_tokens=arguments.chunk_tokens,
        assume_room=arguments.assume_room,
        profiling=Profiling(cache=cache),
    )
    saturated = serve_at(rate=ALL_AT_ONCE)
    servings = [serve_at(rate=round(load * saturated.gpu_only.requests_per_s, 4)) for load in LOADS]
    cache.close()
    print(conditions(saturated, arguments.lengths), table(servings), sep="\n\n")
    if arguments.plot:
        pictures.save(arguments.plot, picture(servings), "A server under load")


if __name__ == "__main__":
    main()
