"""Layers as text: ``conv:1x24x56x56,96,1x1,s1,p0`` and ``fc:8x1280,1000``."""

from __future__ import annotations

import re

from pimflow.core.commands import check_size
from pimflow.core.kernel import ConvGeometry
from pimflow.errors import UnknownNameError, UsageError

CONV_FORM = "conv:NxCxHxW,OUT,KHxKW[,sS][,pP][,dD]"
FC_FORM = "fc:[Nx]IN,OUT"
FORMS = f"{CONV_FORM} (such as conv:1x24x56x56,96,1x1,s1,p0) or {FC_FORM} (such as fc:1280,1000)"
_FORMS = {"conv": CONV_FORM, "fc": FC_FORM}
_OPTIONS = {"s": ("stride", 1), "p": ("padding", 0), "d": ("dilation", 1)}


def parse_layer(text: str) -> ConvGeometry:
    """The convolution or fully connected layer that `text` describes.

    ``conv:NxCxHxW,OUT,KHxKW`` has batch, channels, height and width of the input, output channels and kernel
    size; then optionally ``sS`` stride (1), ``pP`` padding on both sides (0), ``dD`` dilation (1), each one
    number or vertical x horizontal. ``fc:[Nx]IN,OUT`` has batch (1), inputs and outputs.

    Raises
    ------
    UnknownNameError
        For another kind of layer.
    UsageError
        With the wrong part: a number out of range, a missing or additional part, or a window that does not
        fit the input.
    """
    kind, _, rest = text.partition(":")
    if kind not in _FORMS:
        raise UnknownNameError("kind of layer", kind, _FORMS)
    try:
        geometry = (_parse_conv if kind == "conv" else _parse_fc)(rest.split(","))
        for name in ("oh", "ow"):
            if getattr(geometry, name) < 1:
                raise ValueError("the window does not fit the padded input")
        check_size("output pixels", geometry.pixels, 1)
        check_size("reduction", geometry.reduction, 1)
    except ValueError as error:
        raise UsageError(f"layer '{text}': {error}; write it as {_FORMS[kind]}") from None
    return geometry


def _parse_conv(parts: list[str]) -> ConvGeometry:
    if len(parts) < 3:
        raise ValueError(f"{len(parts)} parts of at least 3 (input, output channels, kernel)")
    n, c, h, w = _parse_sizes("input", parts[0], (4,))
    (oc,) = _parse_sizes("output channels", parts[1], (1,))
    kh, kw = _parse_sizes("kernel", parts[2], (2,))
    options: dict[str, tuple[int, int]] = {}
    for part in parts[3:]:
        if part[:1] not in _OPTIONS:
            raise ValueError(f"part '{part}' starts with none of {', '.join(_OPTIONS)}")
        name, minimum = _OPTIONS[part[0]]
        if name in options:
            raise ValueError(f"{name} is given twice")
        sizes = _parse_sizes(name, part[1:], (1, 2), minimum)
        options[name] = (sizes[0], sizes[-1])
    vertical, horizontal = options.get("padding", (0, 0))
    return ConvGeometry(
        n=n,
        h=h,
        w=w,
        c=c,
        oc=oc,
        kh=kh,
        kw=kw,
        stride=options.get("stride", (1, 1)),
        dilation=options.get("dilation", (1, 1)),
        padding=(vertical, horizontal, vertical, horizontal),
    )


def _parse_fc(parts: list[str]) -> ConvGeometry:
    if len(parts) != 2:
        raise ValueError(f"{len(parts)} parts of 2 (inputs, outputs)")
    *batch, c = _parse_sizes("inputs", parts[0], (1, 2))
    (oc,) = _parse_sizes("outputs", parts[1], (1,))
    return ConvGeometry(n=batch[0] if batch else 1, h=1, w=1, c=c, oc=oc)


def _parse_sizes(name: str, text: str, counts: tuple[int, ...], minimum: int = 1) -> list[int]:
    """The numbers of a text such as ``1x24x56x56``."""
    if not re.fullmatch(r"[0-9]+(x[0-9]+)*", text, re.ASCII):
        raise ValueError(f"{name} '{text}' is no number or NxN")
    numbers = text.split("x")
    if len(numbers) not in counts:
        required = " or ".join(map(str, counts))
        raise ValueError(f"{name} '{text}' has {len(numbers)} numbers, not {required}")
    if any(len(number) > 10 for number in numbers):
        raise ValueError(f"{name} '{text:.40}' is too large")
    sizes = [int(number) for number in numbers]
    for size in sizes:
        check_size(name, size, minimum)
    return sizes
