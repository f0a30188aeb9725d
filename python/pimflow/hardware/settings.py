"""Settings of a sweep: fields of a system and its devices, and the values of each."""

from __future__ import annotations

import typing
from dataclasses import dataclass, replace
from typing import Any

from pimflow.errors import SpecError, UnknownNameError, UsageError
from pimflow.hardware import GpuSpec, PimSpec, System
from pimflow.hardware.reader import out_of_range

ELLIPSES = ("…", "...")
MAX_VALUES = 10_000  # of a progression; each value is a search
_OWNERS = {"system": System, "gpu": GpuSpec, "pim": PimSpec}
_LOADERS = {"gpu": GpuSpec.load, "pim": PimSpec.load}
_FIXED_FIELDS = ("name", "description", "sources", "constraints", "dtypes", "not_modelled", "cuda_names")
Value = int | float | bool | str


@dataclass(frozen=True, kw_only=True)
class Setting:
    """A field of a system or its devices, and its values in a sweep.

    Attributes
    ----------
    owner : str
        ``system``, ``gpu`` or ``pim``.
    field, key : str
        Field of the owner, and the key if the field is a table of values.
    """

    name: str
    owner: str
    field: str
    key: str
    values: tuple[Value, ...]

    @classmethod
    def parse(cls, text: str) -> Setting:
        """Read ``pim_channels=0,4,…,28``, ``global_buffers=1,2,4`` or ``pim.timing.nRAS=20,30``.

        Raises
        ------
        UsageError
            For text of another form, a value of another type, or a name that several devices have.
        UnknownNameError
            For a name that no device has.
        """
        name, equals, value_list = text.partition("=")
        if not (name and equals and value_list):
            raise UsageError(f"--set {text}: write NAME=VALUE,VALUE,…")
        owner, field, key, kind = _find_field(name)
        values = tuple(
            _parse_value(part, kind, text) for part in _expand_progressions(value_list.split(","), text)
        )
        if len(set(values)) != len(values):
            raise UsageError(f"--set {text}: a value occurs twice")
        return cls(name=name, owner=owner, field=field, key=key, values=values)

    def apply(self, system: System, value: Value) -> System:
        """`system` with that value; raises `UsageError` if the system is then invalid."""
        try:
            if self.owner == "system":
                loader = _LOADERS.get(self.field)
                change: dict[str, Any] = {self.field: loader(str(value)) if loader else value}
                return replace(system, **change)
            device = getattr(system, self.owner)
            if self.key and self.key not in getattr(device, self.field):
                raise UnknownNameError(
                    f"--set {self.owner}.{self.field}", self.key, getattr(device, self.field)
                )
            field_value = {**getattr(device, self.field), self.key: value} if self.key else value
            return replace(system, **{self.owner: replace(device, **{self.field: field_value})})
        except (ValueError, SpecError) as error:
            raise UsageError(f"--set {self.name}={value}: {error}") from error


def _find_field(name: str) -> tuple[str, str, str, type]:
    """Owner, field, key and type of setting `name`."""
    first, *rest = name.split(".")
    if first in ("gpu", "pim") and rest:
        owners, path = [first], rest
    else:
        owners, path = list(_OWNERS), [first, *rest]
    matches = []
    for owner in owners:
        kind = typing.get_type_hints(_OWNERS[owner]).get(path[0])
        if kind is None or path[0] in _FIXED_FIELDS:
            continue
        table = typing.get_origin(kind) is dict
        if len(path) == (2 if table else 1):
            matches.append(
                (owner, path[0], path[1] if table else "", typing.get_args(kind)[1] if table else kind)
            )
    if not matches:
        setting_names = [
            field if owner == "system" else f"{owner}.{field}"
            for owner, cls in _OWNERS.items()
            for field in typing.get_type_hints(cls)
            if field not in _FIXED_FIELDS
        ]
        raise UnknownNameError("setting", name, setting_names)
    if len(matches) > 1:
        choices = " or ".join(f"{owner}.{name}" for owner, *_ in matches)
        raise UsageError(f"--set {name}: say {choices}")
    return matches[0]


def _expand_progressions(parts: list[str], text: str) -> list[str]:
    """`parts` with progressions such as 0,4,…,28 expanded."""
    if not any(part in ELLIPSES for part in parts):
        return parts
    try:
        ellipsis = next(index for index, part in enumerate(parts) if part in ELLIPSES)
        first, second = map(int, parts[max(ellipsis - 2, 0) : ellipsis])
        last = int(parts[ellipsis + 1])
    except (ValueError, IndexError):
        raise UsageError(f"--set {text}: write two whole numbers before … and one after") from None
    step = second - first
    if step == 0 or (last - second) % step or (last - second) // step < 1:
        raise UsageError(f"--set {text}: {last} is not reached from {first} in steps of {step}")
    if (last - second) // step > MAX_VALUES:
        raise UsageError(f"--set {text}: more than {MAX_VALUES} values")
    between = [str(value) for value in range(second + step, last, step)]
    return parts[:ellipsis] + between + _expand_progressions(parts[ellipsis + 1 :], text)


def _parse_value(text: str, kind: object, setting_text: str) -> Value:
    if kind in (int, float):
        try:
            value = kind(text)
        except ValueError:
            raise UsageError(
                f"--set {setting_text}: '{text}' is no {'whole ' * (kind is int)}number"
            ) from None
        if fault := out_of_range(value):
            raise UsageError(f"--set {setting_text}: {fault}")
        return value
    if kind is bool:
        if text not in ("true", "false"):
            raise UsageError(f"--set {setting_text}: '{text}' is neither true nor false")
        return text == "true"
    return text
