"""Hook of MkDocs: formulas of the pages as MathML, which browsers draw by themselves, without a script."""

import html
import re

from latex2mathml.converter import convert

# As pymdownx.arithmatex marks them.
FORMULA = re.compile(r'<span class="arithmatex">\\\((.*?)\\\)</span>', re.DOTALL)


def on_page_content(content: str, **_: object) -> str:
    """Return the HTML of a page with MathML in place of LaTeX; MkDocs calls this."""
    return FORMULA.sub(lambda formula: convert(html.unescape(formula[1])), content)
