"""Families of decoders by the forms in which people have them: are the tokens those of transformers?

    python scripts/language_doors.py --families "llama;qwen3" --forms "GGUF;folder" --results doors.json
    python scripts/language_doors.py --results doors.json --update    # the table of docs/language_models.md

A cell has how many of 16 tokens are those that transformers generates greedily; `refused` with the number
of the line that says why, before anything is printed; or `not written` where the exporter fails. Results are
kept in a file, so that several runs fill one table: a cell that is there is not run again. Needs torch,
transformers, onnxscript and gguf.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path

PROMPT, COUNT = [5, 17, 200, 43, 9, 77, 120, 31, 8, 250, 61, 19], 16
PAGE = Path(__file__).resolve().parents[1] / "docs" / "language_models.md"
BEGIN, END = "<!-- doors begin (scripts/language_doors.py --update) -->\n", "<!-- doors end -->"


def run_cell(family: str, form: str) -> str:
    """The content of a cell."""
    from language_exports import greedy_tokens, make_model, write_form

    with tempfile.TemporaryDirectory() as scratch:
        try:
            path = write_form(family, form, Path(scratch))
        except Exception as error:  # whatever an exporter raises
            return f"not written: {type(error).__name__}: {str(error).splitlines()[0][:100]}"
        tokens = ",".join(map(str, PROMPT))
        command = ["generate", str(path), "--tokens", tokens, "-n", str(COUNT), "--json", "--quiet"]
        done = subprocess.run(
            [sys.executable, "-m", "pimflow", *command], capture_output=True, text=True, check=False
        )
        if done.returncode:
            lines = done.stderr.strip().splitlines()
            kind = "refused" if len(lines) == 1 and done.returncode in (2, 3, 4) else "FAILED"
            reason = (
                lines[-1].replace(scratch, "").removeprefix("pimflow: error: ") if lines else "no message"
            )
            return f"{kind}: {reason[:200]}"
        generated = json.loads(done.stdout)["tokens"]
    expected = greedy_tokens(make_model(family), PROMPT, COUNT)
    equal = next((k for k, pair in enumerate(zip(generated, expected)) if pair[0] != pair[1]), COUNT)
    return f"{equal} of {COUNT}"


def table(results: dict[str, dict[str, str]], forms: list[str]) -> str:
    """The table, and the reasons of refusals below it."""
    reasons: list[str] = []
    rows = [f"| family | {' | '.join(forms)} |", "|---" * (len(forms) + 1) + "|"]
    for family, cells in results.items():
        row = []
        for form in forms:
            word, _, reason = cells.get(form, "not run").partition(": ")
            if reason and word != "not written":
                reason = reason.partition("': ")[2] or reason
                if reason not in reasons:
                    reasons.append(reason)
                word += f" ({reasons.index(reason) + 1})"
            row.append(word)
        rows.append(f"| {family} | {' | '.join(row)} |")
    return "\n".join([*rows, "", *(f"{number}. {reason}" for number, reason in enumerate(reasons, 1))])


def main() -> None:
    """Run the cells that are asked for, and write the table if asked."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--families", default="", help="names, with ; between them; 'all' for all")
    parser.add_argument("--forms", default="", help="names, with ; between them (default: all)")
    parser.add_argument("--results", type=Path, default=Path("language-doors.json"))
    parser.add_argument("--update", action="store_true", help="write the table into docs/language_models.md")
    args = parser.parse_args()
    from language_exports import FAMILIES, FORMS

    results = json.loads(args.results.read_text()) if args.results.exists() else {}
    families = list(FAMILIES) if args.families == "all" else [f for f in args.families.split(";") if f]
    for family in families:
        for form in [form for form in args.forms.split(";") if form] or list(FORMS):
            if form in results.setdefault(family, {}):
                continue
            results[family][form] = cell = run_cell(family, form)
            print(f"{family} / {form}: {cell}", flush=True)
            args.results.write_text(json.dumps(results, indent=1))
    if args.update:
        ordered = {family: results[family] for family in FAMILIES if family in results}
        head, _, rest = PAGE.read_text("utf-8").partition(BEGIN)
        PAGE.write_text(f"{head}{BEGIN}{table(ordered, list(FORMS))}\n{END}{rest.partition(END)[2]}", "utf-8")


if __name__ == "__main__":
    main()
