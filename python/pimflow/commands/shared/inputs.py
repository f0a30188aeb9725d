"""Inputs that a network is run on: arrays, files or distributions; one sample or several."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias, TypeGuard

from pimflow.core.options import OptionSet, mapping_check, option, type_error
from pimflow.errors import UnknownNameError, UsageError
from pimflow.host.array_files import read_array, read_arrays

if TYPE_CHECKING:
    import numpy as np

    from pimflow.compiler.interface import Interface
    from pimflow.zoo import Draw

Inputs: TypeAlias = "Mapping[str, np.ndarray] | np.ndarray | str | os.PathLike[str]"


def _check_inputs(name: str, inputs: Any) -> Any:
    is_array = hasattr(inputs, "__array__")
    if not (inputs is None or is_array or isinstance(inputs, Mapping | str | os.PathLike)):
        raise type_error(name, inputs, "a mapping of names to arrays, an .npz file, or None")
    return inputs


def _check_input_value(_: str, value: Any) -> Any:
    """A value, with a distribution or a path in place of a text."""
    from pimflow.zoo import Draw  # loads onnx, so only if it is needed

    if not isinstance(value, str):
        return value
    return Draw.parse(value) if value.endswith(")") else Path(value)


def _parse_input(text: str, flag: str) -> tuple[str, str]:
    """Read ``NAME=FILE.npy`` or ``NAME=uniform(0,1)``; the name is empty if there is none."""
    name, _, content = text.rpartition("=")
    if not content:
        raise UsageError(f"{flag} {text}: give an input and its value, such as {flag} x=uniform(0,1)")
    return name, content


@dataclass(frozen=True, kw_only=True)
class InputOptions(OptionSet):
    """Inputs that a network is run on; without these they are drawn."""

    inputs: Inputs | None = option(
        None,
        "--inputs FILE.npz",
        "inputs by name, each of its shape, or of several samples along a further first dimension",
        group="network",
        check=_check_inputs,
    )
    input_values: Mapping[str, np.ndarray | os.PathLike[str] | Draw | str] | None = option(
        None,
        "--input NAME=VALUE",
        "an input: FILE.npy, FILE.npz of several by name, or what it is drawn from: uniform(LOW,HIGH), "
        "normal(MEAN,DEVIATION) or whole numbers int(LOW,HIGH); repeat it for each; a network of one input "
        "needs no NAME",
        group="network",
        parse=_parse_input,
        is_mapping=True,
        check=mapping_check(
            "a mapping of input names to arrays, files or texts such as 'uniform(0,1)'", _check_input_value
        ),
    )

    def given_arrays(self) -> dict[str, np.ndarray]:
        """The arrays by input, those of files too; the name is empty for the only input.

        Raises
        ------
        ArtifactError
            If a file cannot be read.
        """
        import numpy as np  # slow: help needs none

        arrays: dict[str, np.ndarray] = {}
        if isinstance(self.inputs, str | os.PathLike):
            arrays = read_arrays(self.inputs)
        elif isinstance(self.inputs, Mapping):
            arrays = dict(self.inputs)
        elif self.inputs is not None:
            arrays = {"": np.asarray(self.inputs)}
        values: dict[str, Any] = {}
        for name, value in (self.input_values or {}).items():
            if isinstance(value, os.PathLike) and not name and Path(value).suffix == ".npz":
                values |= read_arrays(value)
            elif not _is_draw(value):
                values[name] = read_array(value) if isinstance(value, os.PathLike) else value
        for name in arrays.keys() & values.keys():
            raise UsageError(f"input '{name}' is in the inputs and given by itself too; leave out one")
        return arrays | values

    @property
    def given_draws(self) -> dict[str, Draw]:
        """The distributions by input; the name is empty for the only input."""
        return {name: value for name, value in (self.input_values or {}).items() if _is_draw(value)}

    def samples(
        self, interface: Interface, draw: Callable[[Mapping[str, Draw]], Mapping[str, np.ndarray]]
    ) -> tuple[dict[str, np.ndarray], ...]:
        """The inputs of every sample, at least one, as `Interface.order_inputs` gives them.

        Parameters
        ----------
        draw : callable
            Draws all inputs, some of them from other distributions.

        Raises
        ------
        ArtifactError, UsageError
            See `Interface.order_inputs`; for inputs of different numbers of samples.
        """
        names = list(interface.inputs)
        arrays, draws = inputs_by_name(self.given_arrays(), names), inputs_by_name(self.given_draws, names)
        for name in draws:
            if name not in names:
                raise UnknownNameError("input", name, names)
        drawn = dict(draw(draws)) if draws or self.inputs is None else {}
        if self.inputs is not None:
            drawn = {name: drawn[name] for name in draws}
        counts = {
            name: len(array)
            for name, array in arrays.items()
            if name in interface.inputs and _is_stacked(array, interface.inputs[name][0])
        }
        if len({*counts.values()}) > 1 or 0 in counts.values():
            numbers = ", ".join(f"{count} of '{name}'" for name, count in counts.items())
            raise UsageError(f"inputs have different numbers of samples, or none: {numbers}")
        return tuple(
            interface.order_inputs(
                drawn | {name: array[i] if name in counts else array for name, array in arrays.items()}
            )
            for i in range(next(iter(counts.values()), 1))
        )


def _is_stacked(array: Any, shape: tuple[int, ...]) -> bool:
    """Whether an array has a dimension of samples before those of an input."""
    import numpy as np

    try:
        dims = np.shape(array)
    except ValueError:  # rows of different lengths, which `Interface.order_inputs` says
        return False
    return len(dims) == len(shape) + 1 and dims[1:] == shape


def _is_draw(value: object) -> TypeGuard[Draw]:
    from pimflow.zoo import Draw

    return isinstance(value, Draw)


def inputs_by_name(inputs: Mapping[str, Any] | np.ndarray, names: Sequence[str]) -> dict[str, Any]:
    """Inputs by their names; an array, or a value without a name, is the only input.

    Raises
    ------
    UsageError
        If there are several inputs, or the only one is given twice.
    """
    values = dict(inputs) if isinstance(inputs, Mapping) else {"": inputs}
    if "" not in values or "" in names:
        return values
    if len(names) != 1 or names[0] in values:
        raise UsageError(f"the network has inputs {', '.join(names)}: give each by name, once")
    return {name or names[0]: value for name, value in values.items()}


def network_keywords(model: object, options: InputOptions, keywords: Mapping[str, Any]) -> dict[str, Any]:
    """Keywords of `NetworkOptions`, with shapes of given arrays for the inputs that the model leaves open."""
    from pimflow import zoo

    arrays = options.given_arrays()
    shapes = keywords.get("shapes") or getattr(keywords.get("options"), "shapes", None) or {}
    ranks = zoo.open_ranks(model) if arrays else {}
    if "" in arrays and len(ranks) == 1:
        arrays = {next(iter(ranks)): arrays[""]}
    unknown = {name: ranks[name] for name in ranks.keys() - {*shapes}}
    array_shapes = zoo.shapes_from_arrays(unknown, arrays)
    return {**keywords, "shapes": {**array_shapes, **shapes}} if array_shapes else dict(keywords)
