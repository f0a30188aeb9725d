"""Names as a stranger may give them to layers, networks and folders: as HTML, each would run a script."""

from itertools import product

MARK = "data-hostile"  # on every element that a name would make, if it were read as HTML
_RUN = "window.hostile=(window.hostile||0)+1"

# What ends the place where a name stands.
_ENDINGS = (
    *("", "\"'>", "</script>", "</style>", "</title></textarea>"),
    *("-->", "*/", "&quot;&gt;", "\\\"'`;", "]]>\n"),
)

# What then runs. Without a slash it is a folder's name too.
_ELEMENTS = (
    f"<img src=x onerror={_RUN} {MARK}>",
    f"<svg onload={_RUN} {MARK}>",
    f"<script {MARK}>{_RUN}</script>",
    f"<iframe srcdoc='<script>parent.{_RUN}</script>' {MARK}>",
    f"<details open ontoggle={_RUN} {MARK}>",
    f"<video {MARK}><source onerror={_RUN}></video>",
    f"<audio src=x onerror={_RUN} {MARK}>",
    f"<input autofocus onfocus={_RUN} {MARK}>",
    f"<a href=javascript:{_RUN} onmouseover={_RUN} onclick={_RUN} {MARK}>x</a>",
    f"<object data=javascript:{_RUN} onerror={_RUN} {MARK}>",
    f"<marquee onstart={_RUN} {MARK}>x</marquee>",
    f"<form action=javascript:{_RUN} {MARK}><button onmouseenter={_RUN}>x</button></form>",
    f"<style onload={_RUN} {MARK}>*{{animation:x 1s}}</style>",
    f"<div onpointerover={_RUN} onmousemove={_RUN} onclick={_RUN} {MARK}>x</div>",
    f"<base href=javascript:{_RUN}// {MARK}>",
    f"&lt;img src=x onerror={_RUN} {MARK}&gt;",
    f"\\u003cimg src=x onerror={_RUN} {MARK}\\u003e",
    f"javascript:{_RUN}",
    f"{{{{constructor.constructor('{_RUN}')()}}}}${{{_RUN}}}",
    f"datum.constructor.constructor('{_RUN}')()",
)
NAMES = tuple(ending + element for ending, element in product(_ENDINGS, _ELEMENTS))
FOLDERS = tuple(name for name in NAMES if "/" not in name and name.isprintable())
