"""What language models take on systems, as tables: ``bench_generate.py [--write] [MODELS...]``.

Each row compiles and verifies one block of the model (all of `tiny-lm`), multiplied by the number of blocks.
``--write`` puts each row into the table of docs/language_models.md when it is done, in place of the row of
the same model, PIM device, context and batch; then it writes the page's recording, and the shorter one of the
README. ``--parts`` only shows what takes the time of a step of one model. ``--plans`` only lets a model of a
GGUF file generate tokens by plans of several kinds, each in a new process. ``--grid`` searches steps of
`GRID` by context and batch, and compiles nothing.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import itertools
import multiprocessing
import re
import resource
import time
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from configurations import fill

from pimflow import Generation, Profiling, generate, search, system, zoo
from pimflow.commands.generate.decoding import shared_regions
from pimflow.commands.generate.generation import StepCosts
from pimflow.commands.main import main as pimflow
from pimflow.commands.shared.published_decode import PublishedDecode
from pimflow.core.kernel import ELEMENT_BYTES
from pimflow.core.region import APPEND, Region
from pimflow.host.result_cache import ResultCache, default_path
from pimflow.placement.solvers.capacity import weight_row_bytes
from pimflow.zoo.language import graph
from pimflow.zoo.language.gguf_decoder import read_decoder

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs/language_models.md"
README = ROOT / "README.md"
MODELS = ("tiny-lm", "gpt-2", "opt-6.7b", "llama-2-7b", "llama-3-8b")
PIMS = ("newton-gddr6", "aim-gddr6")
PROMPT = 1  # tokens: the table is of decoding
RECORDED_COMMAND = ("generate", "tiny-lm", "--prompt", "The statement is", "-n", "64", "--quiet")
SHORT_COMMAND = ("generate", "tiny-lm", "--prompt", "The statement is", "-n", "24", "--quiet")
HEAD = (
    "| model | PIM | context | batch | best GPU, ms | GPU alone, ms | plan, ms | tokens/s | mJ a token "
    "| of the bound |",
    "|---|---|---|---|---|---|---|---|---|---|",
)


def row(model: str, pim: str, context: int, batch: int, profiling: Profiling) -> Generation:
    """Generate with full caches: the figures of one row of the table."""
    return generate(
        model,
        tokens=range(PROMPT),
        n=1,
        context=context,
        batch=batch,
        system=system(pim=pim),
        profiling=profiling,
    )


def line(generation: Generation) -> str:
    """A row of the table as Markdown."""
    full = generation.full_cache
    speedup = full.tpot_ns_gpu_only / full.tpot_ns
    cells = (
        generation.model,
        generation.pim,
        generation.context,
        generation.batch,
        best_gpu_cell(full.tpot_ns_gpu_published, full.tpot_ns),
        f"{full.tpot_ns_gpu_only / 1e6:.3f}",
        f"{full.tpot_ns / 1e6:.3f} ({speedup:.2f}x)",
        f"{generation.batch / full.tpot_ns * 1e9:.0f}",
        f"{full.energy_per_token_pj_gpu_only / 1e9:.1f} → {full.energy_per_token_pj / 1e9:.1f}",
        f"{full.fraction_of_bound:.1%}",
    )
    return f"| {' | '.join(map(str, cells))} |"


def best_gpu_cell(published_ns: float | None, plan_ns: float) -> str:
    """Time of a step on the best published GPU, and how often the plan is as fast; empty without one."""
    return "" if published_ns is None else f"{published_ns / 1e6:.3f} ({published_ns / plan_ns:.2f}x)"


GRID = ("llama-2-7b", "llama-3-8b")
CONTEXTS, BATCHES = (128, 1024, 4096), (1, 4, 16)


@dataclass(frozen=True, kw_only=True)
class StepSearch:
    """Times of a decode step of all blocks and the head with full caches, and the bytes in PIM's rows.

    `published_ns` is the time on the best published GPU.
    """

    times: StepCosts
    published_ns: float | None
    held_bytes: int


def step_figures(model: str, pim: str, context: int, batch: int, profiling: Profiling) -> StepSearch:
    """Search one cell of the grid."""
    decoder, target = zoo.decoder(model), system(pim=pim)
    block_graph = graph.block_graph(decoder, context, batch=batch)
    block = search(block_graph, target, context=context, profiling=profiling)
    head = search(graph.head_graph(decoder, batch=batch), target, profiling=profiling)
    pim_bytes = [weight_row_bytes(target, search_result.candidates) for search_result in (block, head)]
    published = PublishedDecode.from_decoder(decoder, target)
    return StepSearch(
        published_ns=published and published.step_ns(context, batch),
        times=StepCosts.from_search(block, decoder.layers, shared_regions(block.graph))
        + StepCosts.from_search(head),
        held_bytes=decoder.layers * pim_bytes[0] + pim_bytes[1],
    )


def grid_line(model: str, pim: str, batch: int, steps: Sequence[StepSearch]) -> str:
    """A row of the grid as Markdown: a cell for each context."""
    cells = (_grid_cell(step, batch, system(pim=pim).pim_bytes) for step in steps)
    return f"| {model} | {pim} | {batch} | {' | '.join(cells)} |"


def _grid_cell(step: StepSearch, batch: int, capacity_bytes: int) -> str:
    ms, gpu_only_ms = step.times.ns / 1e6, step.times.ns_gpu_only / 1e6
    memory_text = (
        f"{step.held_bytes / 2**30:.1f} GiB{'' if step.held_bytes <= capacity_bytes else ', no room'}"
    )
    best = step.published_ns and f", {step.published_ns / step.times.ns:.2f}x of the best GPU"
    speedups = f"{gpu_only_ms / ms:.2f}x{best or ''}"
    return f"{gpu_only_ms:.2f} → {ms:.2f} ({speedups}), {batch / ms * 1e3:.0f}/s, {memory_text}"


def grid(models: Sequence[str], batches: Sequence[int], profiling: Profiling, write: bool) -> None:
    """Print the grid, and write each row to the page when it is done."""
    head = [
        f"| model | PIM | batch | {' | '.join(f'{tokens} tokens' for tokens in CONTEXTS)} |",
        "|---" * (3 + len(CONTEXTS)) + "|",
    ]
    print(*head, sep="\n", flush=True)
    for model, pim, batch in itertools.product(models, PIMS, batches):
        steps = [step_figures(model, pim, context, batch, profiling) for context in CONTEXTS]
        grid_row = grid_line(model, pim, batch, steps)
        print(grid_row, flush=True)
        if write:
            page = with_row(PAGE.read_text("utf-8"), grid_row, "grid", head)
            PAGE.write_text(page, "utf-8")


KINDS = ("products with weights", "attention", "positions", "norms and others")
ONCE = "once a step: tables of positions, mask"


def parts_table(model: str, context: int, profiling: Profiling) -> list[str]:
    """Time of a model's block by kind of region, on the GPU alone and by each plan, as Markdown.

    A region's time is what it adds to the step, so that the regions of a block add up to its time. Regions
    that the first block computes for all blocks have a row of their own.
    """
    decoder = zoo.decoder(model)
    block = graph.block_graph(decoder, context, tokens=1, batch=1)
    columns: dict[str, Counter[str]] = {}
    for pim in PIMS:
        search_result = search(block, system(pim=pim), context=context, profiling=profiling)
        once_regions = shared_regions(search_result.graph)
        for name, evaluation in (("GPU alone", search_result.gpu_only), (pim, search_result.evaluation)):
            figures_by_kind: Counter[str] = Counter()
            for region, times in evaluation.region_times.items():
                figures_by_kind[
                    ONCE if region in once_regions else _kind(search_result.graph.region(region))
                ] += times.latency_ns
            launches = [event for event in evaluation.timeline.events if event.launched]
            figures_by_kind["launches of kernels"] = sum(event.resource == "gpu" for event in launches)
            figures_by_kind["submissions to PIM"] = sum(event.resource == "pim" for event in launches)
            columns[name] = figures_by_kind
    lines = [f"| {model}, us a block | {' | '.join(columns)} |", "|---" * (1 + len(columns)) + "|"]
    for kind in KINDS:
        lines.append(f"| {kind} | {' | '.join(f'{column[kind] / 1e3:.1f}' for column in columns.values())} |")
    totals = (sum(column[kind] for kind in KINDS) for column in columns.values())
    lines.append(f"| all | {' | '.join(f'{ns / 1e3:.1f}' for ns in totals)} |")
    lines.append(f"| {ONCE} | {' | '.join(f'{column[ONCE] / 1e3:.1f}' for column in columns.values())} |")
    for kind in ("launches of kernels", "submissions to PIM"):
        lines.append(f"| {kind} | {' | '.join(str(column[kind]) for column in columns.values())} |")
    return lines


def _kind(region: Region) -> str:
    if region.geometry:
        return KINDS[0]
    if region.attention or region.operator == APPEND:
        return KINDS[1]
    return KINDS[2] if "strided_slice" in region.operators else KINDS[3]


PLANS = {"GPU alone": "gpu", "PIM": "gpu,pim", "mixed": None}
GENERATED_TOKENS = 32  # tokens
PLANS_PROMPT = "Once upon a time"
PLANS_HEAD = (
    "| plan | regions on PIM | tokens | had to be the same | largest error (bound) | model, ms a token "
    "| by value, s of CPU a token | GiB beyond the weights |",
    "|---|---|---|---|---|---|---|---|",
)


def plan_row(path: str, plan: str) -> str:
    """Generate and verify tokens by a plan of one kind: a row of the table. It runs in a new process."""
    token_times: list[float] = []
    modes = {} if PLANS[plan] is None else {"modes": PLANS[plan]}
    generation = generate(
        path,
        prompt=PLANS_PROMPT,
        n=GENERATED_TOKENS,
        on_text=lambda _: token_times.append(time.process_time()),
        **modes,
    )
    # The first two tokens come from steps that are compiled first.
    seconds = (token_times[-1] - token_times[1]) / (len(token_times) - 2)
    peak_bytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    weight_bytes = read_decoder(Path(path)).parameters * ELEMENT_BYTES[generation.dtype]
    assert generation.verified and generation.timing_violations == 0 and generation.tokens is not None
    cells = (
        plan,
        f"{generation.regions_on_pim} of {generation.regions}",
        len(generation.tokens),
        generation.sure_tokens,
        f"{generation.max_relative_error:.1e} ({generation.bound:.1e})",
        f"{generation.tpot_ns / 1e6:.2f}",
        f"{seconds:.2f}",
        f"{(peak_bytes - weight_bytes) / 2**30:.2f}",
    )
    return f"| {' | '.join(map(str, cells))} |"


def recording(command: Sequence[str], *, complete: bool = True) -> str:
    """A command and what it prints; unless `complete`, only the time of a token and the check of its
    table.
    """
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        code = pimflow([*command])
    assert code == 0, command
    words = [f'"{word}"' if " " in word else word for word in command]
    lines = [f"$ pimflow {' '.join(words)}", *out.getvalue().rstrip().splitlines()]
    if not complete:
        table = next(index for index, output_line in enumerate(lines) if output_line.startswith("system "))
        rows = {output_line.split()[0]: output_line for output_line in lines[table:]}
        *_, gpu_only_ms, plan_ms, _ = rows["each"].split()
        lines = [*lines[:table], f"token     {plan_ms} ms, on the GPU alone {gpu_only_ms} ms", rows["check"]]
    return "\n".join(f"    {line}".rstrip() for line in lines)


def with_row(text: str, new_row: str, name: str = "decode", head: Sequence[str] = HEAD) -> str:
    """The page with a row added or replaced, in the order of `MODELS`, `PIMS` and the leading numbers."""

    def key(cells: str) -> tuple[int, ...]:
        """The sort key of a row: model, PIM, then its numbers."""
        model, pim, *others = (cell.strip() for cell in cells.split("|")[1:-1])
        numbers = itertools.takewhile(str.isdigit, others)
        return MODELS.index(model), PIMS.index(pim), *map(int, numbers)

    body = re.search(rf"<!-- {name} begin[^>]*-->\n(.*?)<!-- {name} end -->", text, re.DOTALL)
    assert body is not None
    old_rows = [entry for entry in body[1].splitlines() if entry.startswith("|")][len(head) :]
    rows = {key(entry): entry for entry in (*old_rows, new_row)}
    return fill(text, name, "\n".join([*head, *(rows[entry] for entry in sorted(rows))]))


def main() -> None:
    """Read the arguments of the command line, and do what the top of this file says."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("models", nargs="*", metavar="MODELS")
    parser.add_argument("--context", type=int, default=1024, help="default: %(default)s")
    parser.add_argument("--write", action="store_true", help="write docs/language_models.md anew")
    parser.add_argument("--grid", action="store_true", help="by context and batch, searched alone")
    parser.add_argument("--batches", type=int, nargs="+", default=BATCHES, help="of the grid: %(default)s")
    parser.add_argument("--parts", metavar="MODEL", help="what takes the time of a step")
    parser.add_argument("--plans", metavar="GGUF", help="tokens of a model's file by plans of several kinds")
    arguments = parser.parse_args()
    if arguments.plans:
        lines = list(PLANS_HEAD)
        for plan in PLANS:
            with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as process:
                lines.append(process.submit(plan_row, arguments.plans, plan).result())
            print(lines[-1], flush=True)
            if arguments.write:
                PAGE.write_text(fill(PAGE.read_text("utf-8"), "plans", "\n".join(lines)), "utf-8")
        return
    cache = ResultCache(default_path())
    profiling = Profiling(cache=cache)
    if arguments.parts:
        lines = parts_table(arguments.parts, arguments.context, profiling)
        cache.close()
        print(*lines, sep="\n")
        if arguments.write:
            PAGE.write_text(fill(PAGE.read_text("utf-8"), "parts", "\n".join(lines)), "utf-8")
        return
    if arguments.grid:
        grid(arguments.models or GRID, arguments.batches, profiling, arguments.write)
        cache.close()
        return
    print(*HEAD, sep="\n", flush=True)
    for model in arguments.models or MODELS:
        for pim in PIMS:
            table_row = line(row(model, pim, arguments.context, 1, profiling))
            print(table_row, flush=True)
            if arguments.write:
                PAGE.write_text(with_row(PAGE.read_text(encoding="utf-8"), table_row), encoding="utf-8")
    cache.close()
    if arguments.write:
        for path, text in (
            (PAGE, recording(RECORDED_COMMAND)),
            (README, recording(SHORT_COMMAND, complete=False)),
        ):
            path.write_text(fill(path.read_text(encoding="utf-8"), "recording", text), encoding="utf-8")


if __name__ == "__main__":
    main()
