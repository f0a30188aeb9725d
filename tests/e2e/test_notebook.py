"""Does each cell of the notebook run, and is its last value shown as a notebook shows it?"""

import ast
import json
from pathlib import Path

NOTEBOOK = Path(__file__).parents[2] / "docs" / "tutorials" / "notebook.ipynb"
SHOWN = ("<td>newton-gddr6</td>", "<pre>system    rtx-2060-pim32", "<th>layer</th>", "<th>pim_channels</th>")


def test_every_cell_runs_and_shows_a_table_or_lines():
    notebook = json.loads(NOTEBOOK.read_text(encoding="utf-8"))
    assert notebook["nbformat"] == 4
    cells = [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]
    assert not any(cell["outputs"] for cell in cells)
    namespace: dict[str, object] = {}
    for cell, shown in zip(cells, SHOWN, strict=True):
        *statements, last = ast.parse("".join(cell["source"])).body
        exec(compile(ast.Module(statements, []), NOTEBOOK.name, "exec"), namespace)
        assert isinstance(last, ast.Expr)
        value = eval(compile(ast.Expression(last.value), NOTEBOOK.name, "eval"), namespace)
        assert shown in value._repr_html_()
