"""What language models take on systems, as tables: ``bench_generate.py [--write] [MODELS...]``.

Each row compiles and verifies a block of the model (all of `tiny-lm`), counted as often as the model has it.
With ``--write`` the tables and the recording of docs/language_models.md are written anew.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import re
from pathlib import Path

from pimflow import Generation, Profiling, generate, system
from pimflow.cli.main import main as pimflow
from pimflow.host.result_cache import ResultCache, default_path

PAGE = Path(__file__).resolve().parents[1] / "docs/language_models.md"
MODELS = ("tiny-lm", "gpt-2", "opt-6.7b", "llama-2-7b", "llama-3-8b")
PIMS = ("newton-gddr6", "aim-gddr6")
PROMPT = 1  # tokens: the table is of decoding
RECORDED = ["generate", "tiny-lm", "--prompt", "The statement is", "-n", "64", "--quiet"]
HEAD = (
    "| model | PIM | context | batch | GPU alone, ms | plan, ms | tokens/s | mJ a token | of the bound |",
    "|---|---|---|---|---|---|---|---|---|",
)


def row(model: str, pim: str, context: int, batch: int, profiling: Profiling) -> Generation:
    """One line of a table."""
    return generate(
        model,
        tokens=range(PROMPT),
        n=1,
        context=context,
        batch=batch,
        target_system=system(pim=pim),
        profiling=profiling,
    )


def line(found: Generation) -> str:
    """A row of the table as Markdown."""
    speedup = found.tpot_ns_gpu_only / found.tpot_ns
    cells = (
        found.model,
        found.pim,
        found.context,
        found.batch,
        f"{found.tpot_ns_gpu_only / 1e6:.3f}",
        f"{found.tpot_ns / 1e6:.3f} ({speedup:.2f}x)",
        f"{found.tokens_per_s:.0f}",
        f"{found.energy_per_token_pj_gpu_only / 1e9:.1f} → {found.energy_per_token_pj / 1e9:.1f}",
        f"{found.fraction_of_bound:.1%}",
    )
    return f"| {' | '.join(map(str, cells))} |"


def recording() -> str:
    """What the command of `RECORDED` prints, behind the command."""
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        pimflow(RECORDED)
    words = [f'"{word}"' if " " in word else word for word in RECORDED]
    text = f"$ pimflow {' '.join(words)}\n{out.getvalue()}"
    return "\n".join(f"    {line}".rstrip() for line in text.rstrip().splitlines())


def replaced(text: str, name: str, body: str) -> str:
    """`text` with another body between the two marks called `name`."""
    pattern = rf"(<!-- {name} begin[^>]*-->\n).*?(\n<!-- {name} end -->)"
    found, count = re.subn(pattern, lambda match: match[1] + body + match[2], text, flags=re.DOTALL)
    assert count == 1, name
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("models", nargs="*", default=MODELS, metavar="MODELS")
    parser.add_argument("--context", type=int, default=1024, help="default: %(default)s")
    parser.add_argument("--write", action="store_true", help="write docs/language_models.md anew")
    arguments = parser.parse_args()
    cache = ResultCache(default_path())
    profiling = Profiling(cache=cache)
    lines = list(HEAD)
    print(*lines, sep="\n", flush=True)
    for model in arguments.models:
        for pim in PIMS:
            lines.append(line(row(model, pim, arguments.context, 1, profiling)))
            print(lines[-1], flush=True)
    cache.close()
    if arguments.write:
        text = replaced(PAGE.read_text(encoding="utf-8"), "decode", "\n".join(lines))
        PAGE.write_text(replaced(text, "recording", recording()), encoding="utf-8")


if __name__ == "__main__":
    main()
