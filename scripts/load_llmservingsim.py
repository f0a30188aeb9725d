"""What LLMServingSim reads of our tables: ``load_llmservingsim.py CHECKOUT [--update]``.

CHECKOUT is its repository, which is copied and not changed. Its own readers load what ``pimflow export
llmservingsim`` writes: ``attention.csv`` of each number of devices that share the heads, and the entry of
``attn_model``. Times that they give are compared with ours, at the rows, between them, and for another model
to which the simulator scales the entry. ``--update`` writes docs/language_models.md anew.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import io
import json
import operator
import os
import shutil
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

from bench_generate import PAGE, PIMS, replace_block

from pimflow import Profiling, system
from pimflow.commands.generate.export import LENGTHS, ServingAttention, llmservingsim
from pimflow.host.result_cache import ResultCache, default_path

MODEL, SCALED_MODEL = "llama-3-8b", "llama-2-7b"
BETWEEN = (192, 384, 768, 1280, 1792)  # tokens between those of the table
ARCHITECTURE, VARIANT = "llama", "fp16"
SPEC = "HBM2_1GB_2000_pim"  # a device file of the simulator, of whose keys times in PIM depend on none


def exported(model: str, pim: str, lengths: tuple[int, ...], profiling: Profiling) -> ServingAttention:
    """Our times of a model's attention."""
    return llmservingsim(model, system(pim=pim), lengths=lengths, profiling=profiling)


def copy_simulator(checkout: Path, folder: Path, attention: ServingAttention) -> None:
    """Copy the simulator's readers, with our entry among its devices and our tables among its profiles."""
    shutil.copytree(checkout / "serving", folder / "serving")
    shutil.copytree(checkout / "profiler" / "models", folder / "profiler" / "models")
    source = folder / "serving" / "core" / "pim_model.py"
    entry = json.dumps(attention.to_json()["attn_model"])[1:-1]
    text = source.read_text("utf-8")
    assert text.count("attn_model = {") == 1, "the simulator has its table elsewhere"
    source.write_text(text.replace("attn_model = {", f"attn_model = {{ {entry},"), "utf-8")
    spec = (checkout / "configs" / "pim" / f"{SPEC}.ini").read_text("utf-8")
    (folder / f"{attention.pim}_pim.ini").write_text(spec, "utf-8")
    root = folder / "profiler" / "perf" / attention.pim / MODEL / VARIANT
    for devices in (1, 2, 4):
        tables = root / f"tp{devices}"
        tables.mkdir(parents=True)
        (tables / "attention.csv").write_text(attention.attention_csv(devices), "utf-8")
    (root / "meta.yaml").write_text("profiler_version: pimflow\n", "utf-8")


def readers(folder: Path) -> tuple[ModuleType, ModuleType]:
    """The simulator's modules that read profiles and time PIM, of a copy."""
    for name in [name for name in sys.modules if name.partition(".")[0] == "serving"]:
        del sys.modules[name]
    sys.path.insert(0, str(folder))
    try:
        with contextlib.redirect_stdout(io.StringIO()):
            generator = importlib.import_module("serving.core.trace_generator")
            return generator, importlib.import_module("serving.core.pim_model")
    finally:
        sys.path.remove(str(folder))


@contextlib.contextmanager
def below(folder: Path) -> Iterator[None]:
    """Work in a directory below a root, where the simulator expects to run."""
    before = Path.cwd()
    (folder / "astra-sim").mkdir()
    os.chdir(folder / "astra-sim")
    try:
        yield
    finally:
        os.chdir(before)


def largest(errors: list[float]) -> str:
    """The largest of several relative errors, as text, and how many they are."""
    return f"{max(map(abs, errors)):.1%} ({len(errors)})"


def lines(checkout: Path, pim: str, profiling: Profiling) -> list[str]:
    """Rows of the table for a device, as Markdown."""
    attention = exported(MODEL, pim, LENGTHS, profiling)
    between = exported(MODEL, pim, (*BETWEEN, max(LENGTHS)), profiling)
    scaled = exported(SCALED_MODEL, pim, LENGTHS, profiling)
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        copy_simulator(checkout, folder, attention)
        generator, pim_model = readers(folder)
        # They have no public names.
        load, look_up = operator.attrgetter("_load_perf_db", "_lookup_attention")(generator)
        with below(folder):
            database = load(pim, MODEL, VARIANT, {1, 2, 4}, ARCHITECTURE)

        def table_errors(rows: ServingAttention) -> list[float]:
            """Errors of the simulator's look-ups at rows of ours."""
            return [
                look_up(database, attention.kv_heads // row.kv_heads, 0, 0, row.batch, row.tokens) / row.ns
                - 1
                for row in rows.rows
            ]

        device = pim_model.PIMModel(0, 16, str(folder / f"{pim}_pim.ini"))

        def line_errors(model: ServingAttention) -> list[float]:
            """Errors of the simulator's line at times of ours."""
            sizes = (model.heads, model.kv_heads, model.head_size)
            return [
                device.get_pim_latency(*sizes, tokens, model.channels) / time_ns - 1
                for tokens, time_ns in model.line.points.items()
            ]

        cells = (
            *(largest(table_errors(rows)) for rows in (attention, between)),
            *(largest(line_errors(model)) for model in (attention, between, scaled)),
        )
    return [f"| {pim} | {' | '.join(cells)} |"]


def main() -> None:
    """Read the arguments of the command line, and do what the top of this file says."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("checkout", type=Path)
    parser.add_argument("--update", action="store_true", help="write docs/language_models.md anew")
    arguments = parser.parse_args()
    cache = ResultCache(default_path())
    rows = [
        f"| PIM | table, at its rows | between its tokens | line of {MODEL} | between | line scaled to "
        f"{SCALED_MODEL} |",
        "|---|---|---|---|---|---|",
    ]
    for pim in PIMS:
        rows += lines(arguments.checkout.resolve(), pim, Profiling(cache=cache))
    cache.close()
    print(*rows, sep="\n")
    if arguments.update:
        page = replace_block(PAGE.read_text("utf-8"), "llmservingsim", "\n".join(rows))
        PAGE.write_text(page, "utf-8")


if __name__ == "__main__":
    main()
