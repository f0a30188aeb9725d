"""How a network is loaded and rewritten before its search.

Public functions take `NetworkOptions` and `Goal`, or their fields as keywords. An unknown keyword, a value of
another type and an option without effect raise an error before any work.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from numbers import Integral
from typing import TYPE_CHECKING, Any

import numpy as np

from pimflow.core.keywords import check_keywords
from pimflow.core.options import OptionSet, mapping_check, option, require_type, split_keywords
from pimflow.decomposition.request import DecompositionRequest
from pimflow.errors import UsageError
from pimflow.host.array_files import read_array
from pimflow.weight_types import CACHE_TYPES, WRITTEN_TYPES

if TYPE_CHECKING:
    from pimflow.decomposition.calibration import Data

Shapes = Mapping[str, tuple[int, ...]]
States = Mapping[str, str]
# What a search adds to the help of --decompose.
WHERE_HELP = (
    ", ',where=pays' to replace only layers that a search finds cheaper so, by the best of several ranks, "
    "such as tucker:0.1:0.25"
)


def _check_shape(name: str, shape: Any) -> Any:
    require_type(f"the shape of '{name}'", shape, (tuple, list), "a tuple of sizes")
    for size in shape:
        require_type(f"a size of '{name}'", size, (Integral,), "a whole number")
    return shape


def _check_states(name: str, states: Any) -> Any:
    expected = "a mapping of inputs that are caches to the outputs that they become"
    require_type(name, states, (Mapping, type(None)), expected)
    for pair in (states or {}).items():
        for tensor in pair:
            require_type(name, tensor, (str,), expected)
    return states


def _check_decompose(name: str, request: Any) -> DecompositionRequest | None:
    expected = "a Request or its text, such as 'tucker:0.1'"
    require_type(name, request, (DecompositionRequest, str, type(None)), expected)
    return DecompositionRequest.parse(str(request)) if isinstance(request, str) else request


def _check_skips(name: str, criterion: Any) -> Any:
    require_type(name, criterion, (str, type(None)), "the name of a criterion or None")
    if criterion is not None:
        from pimflow.decomposition.skips import check_criterion  # loads TVM, so only if it is needed

        check_criterion(criterion)
    return criterion


def _parse_shape(text: str, _: str) -> tuple[str, tuple[int, ...]]:
    from pimflow import zoo  # loads onnx, so only if it is needed

    return zoo.parse_shape(text)


def _parse_state(text: str, flag: str) -> tuple[str, str]:
    past, equals, present = text.partition("=")
    if not (past and equals and present):
        raise UsageError(f"{flag} {text}: give an input and an output, such as past_key=present_key")
    return past, present


def _parse_value(text: str, flag: str) -> tuple[str, np.ndarray]:
    """Read ``NAME=16000``, ``NAME=1,2,3``, ``NAME=true`` or ``NAME=FILE.npy``."""
    name, equals, content = text.rpartition("=")
    if not (name.strip() and equals and content.strip()):
        raise UsageError(f"{flag} {text}: give an input and its value, such as {flag} sr=16000")
    if content.endswith(".npy"):
        return name.strip(), read_array(content)
    words = [word.strip() for word in content.split(",")]
    try:
        numbers = [_number(word) for word in words]
        return name.strip(), np.array(numbers if len(numbers) > 1 else numbers[0])
    except (ValueError, OverflowError):
        raise UsageError(f"{flag} {text}: '{content}' is no number and no .npy file") from None


def _number(word: str) -> bool | int | float:
    """The number of a word; raises `ValueError`, or `OverflowError` beyond 64 bits."""
    if word.lower() in ("true", "false"):
        return word.lower() == "true"
    try:
        return int(np.int64(int(word)))
    except ValueError:
        return float(word)


def _check_value(name: str, value: Any) -> np.ndarray:
    try:
        array = np.asarray(value)
    except ValueError:  # rows of different lengths
        array = np.array("")
    if array.dtype.kind not in "biuf":
        raise UsageError(f"values: the value of '{name}' is a number or an array of numbers")
    return array


@check_keywords
@dataclass(frozen=True, kw_only=True)
class ShapeOptions(OptionSet, group="network"):
    """Sizes of a network that its file leaves open; see `NetworkOptions`."""

    shapes: Shapes | None = option(
        None,
        "--shape NAME=1,3,224,224",
        "shape of an input whose file leaves it open; repeat it for each input",
        parse=_parse_shape,
        is_mapping=True,
        check=mapping_check(
            "a mapping of input names to tuples of sizes, such as {'input': (1, 3, 224, 224)}", _check_shape
        ),
    )
    batch: int | None = option(None, "--batch N", "inferences at once, for a network that is made for one")


@dataclass(frozen=True, kw_only=True)
class CalibrationOptions(OptionSet):
    """Samples on which a decomposed network is compared with the original; see `pimflow.compile`."""

    calibration: Data | None = option(
        None,
        "--calibration FILE.npz",
        "samples by input name, and perhaps 'labels', on which the report compares the decomposed network "
        "with the original",
        group="decomposition",
    )


@dataclass(frozen=True, kw_only=True)
class ValueOptions(OptionSet, group="network"):
    """Inputs that are constants; see `NetworkOptions`."""

    values: Mapping[str, Any] | None = option(
        None,
        "--value NAME=16000",
        "make an input a constant of the network: a number for all its elements, numbers with commas, true, "
        "false, or a .npy file; repeat it for each input",
        parse=_parse_value,
        is_mapping=True,
        check=mapping_check("a mapping of input names to numbers or arrays", _check_value),
    )


@check_keywords
@dataclass(frozen=True, kw_only=True)
class NetworkOptions(ShapeOptions, ValueOptions):
    """How a network is loaded and rewritten before its search; see `commands.shared.prepare.prepare`.

    Attributes
    ----------
    shapes : mapping of str to tuple of int, optional
        Shapes of inputs that the model leaves open.
    batch : int, optional
        Number of inferences in a batch; see `frontend.load`.
    values : mapping of str to number or ndarray, optional
        Inputs of an ONNX model that are constants of the network before it is imported; see
        `zoo.with_values`.

    Raises
    ------
    UsageError
        For a value of another type or out of its range.
    """

    context: int | None = option(
        None,
        "--context N",
        "of a decoder (.onnx, .pt2, or of the zoo): caches of N tokens, which stay where they are from "
        "step to step",
    )
    states: States | None = option(
        None,
        "--state PAST=PRESENT",
        "with --context: an input that is a cache, and the output that it becomes, where names and "
        "shapes do not identify; repeat it for each",
        parse=_parse_state,
        is_mapping=True,
        check=_check_states,
    )
    weight_type: str = option(
        "fp16",
        "--weight-type TYPE",
        "type in which the GPU, and PIM that takes it, store the weights of a language model of the zoo: "
        "{choices}",
        choices=WRITTEN_TYPES,
    )
    kv_cache_dtype: str = option(
        "fp16",
        "--kv-cache-dtype TYPE",
        "type of the caches of a language model of the zoo, quantised as they are appended, with a scale for "
        "each token and head: {choices}",
        choices=("fp16", *CACHE_TYPES),
    )
    decompose: DecompositionRequest | str | None = option(
        None,
        "--decompose METHOD:RANK",
        "replace layers by chains of smaller ones. METHOD is tucker, cp or tt. RANK is a ratio, "
        "energy=SHARE, vbmf or a .toml file. Append ',first=keep' to keep the first convolution, "
        f"',fc=decompose' to replace fully connected layers too{WHERE_HELP}",
        group="decomposition",
        check=_check_decompose,
    )
    optimize_skips: str | None = option(
        None,
        "--optimize-skips",
        "keep skip connections in their reduced form until they are used",
        group="decomposition",
        check=_check_skips,
    )
    fuse_activations: bool = option(
        False,
        "--fuse-activations",
        "run the end of a chain, activation, pooling and the start of the next chain as one kernel",
        group="decomposition",
    )
    fuse: bool = option(
        False,
        "--fuse",
        "allow neighbouring layers as one GPU kernel over shared memory, in tiles, where that is faster",
        group="search",
    )
    reorder: bool = option(
        False,
        "--reorder",
        "run the layers of a network in another order where that takes less memory",
        group="memory",
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.states and self.context is None:
            raise UsageError("states need a context: how many tokens their caches hold")

    @classmethod
    def from_keywords(
        cls, keywords: Mapping[str, Any], options: NetworkOptions | None = None
    ) -> NetworkOptions:
        """Return `options`, or the defaults, with fields replaced by `keywords`."""
        require_type("options", options, (NetworkOptions, type(None)), "a NetworkOptions or None")
        (values,) = split_keywords(keywords, cls)
        return replace(options or cls(), **values)

    @property
    def rewrites(self) -> bool:
        """Whether the search gets other layers than those of the model, or another order."""
        return bool(self.decompose or self.optimize_skips or self.fuse_activations or self.reorder)

    @property
    def decomposition_request(self) -> DecompositionRequest | None:
        """`decompose` as a parsed request."""
        assert not isinstance(self.decompose, str)
        return self.decompose
