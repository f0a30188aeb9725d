"""JSON schemas of the files that `pimflow.core.json_form` writes, from the types of their fields."""

import dataclasses
import enum
import inspect
import re
import types
import typing
from collections.abc import Mapping

Schema = dict[str, object]
_TYPES = {str: "string", int: "integer", float: "number", bool: "boolean", type(None): "null"}
_ATTRIBUTE = re.compile(r"^(\w+(?:, \w+)*)(?: : .*)?\n((?:    .*\n?)+)", re.MULTILINE)


def file_schema(kind: type, title: str, names: Mapping[str, type]) -> Schema:
    """The schema of a file that is a dataclass of `kind`.

    Parameters
    ----------
    names : mapping of str to type
        Types that a module of fields imports for type checkers only.
    """
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": title,
        **_Schemas(names).of_class(kind),
    }


class _Schemas:
    def __init__(self, names: Mapping[str, type]) -> None:
        self.names = dict(names)

    def of_class(self, kind: type) -> Schema:
        """The schema of a dataclass; flat fields are in place."""
        hints = typing.get_type_hints(kind, localns=self.names)
        descriptions = _descriptions(kind)
        required: list[str] = []
        properties: Schema = {}
        for field in dataclasses.fields(kind):
            hint, metadata = hints[field.name], field.metadata
            if metadata.get("flat"):
                inner = self.of_class(hint)
                properties |= inner["properties"]
                required += inner["required"]
                continue
            key = metadata.get("key", field.name)
            description = descriptions.get(field.name)
            properties[key] = self.of_type(hint) | ({"description": description} if description else {})
            if not metadata.get("omitted"):
                required.append(key)
        return {"type": "object", "required": required, "properties": properties}

    def of_type(self, hint: object) -> Schema:
        """The schema of a value of a type."""
        origin, arguments = typing.get_origin(hint), typing.get_args(hint)
        if hint in _TYPES:
            return {"type": _TYPES[hint]}
        if origin in (typing.Union, types.UnionType):
            return {"anyOf": [self.of_type(argument) for argument in arguments]}
        if origin is typing.Literal:
            return {"enum": list(arguments)}
        if isinstance(hint, type) and issubclass(hint, enum.Enum):
            return {"enum": [member.value for member in hint]}
        if origin is tuple and arguments[-1] is not ...:
            return {"type": "array", "prefixItems": [self.of_type(argument) for argument in arguments]}
        if origin in (tuple, list):
            return {"type": "array", "items": self.of_type(arguments[0])}
        if origin is dict:
            return {"type": "object", "additionalProperties": self.of_type(arguments[1])}
        if hasattr(hint, "to_table"):  # a form of its own
            return {"type": "object"}
        if dataclasses.is_dataclass(hint):
            return self.of_class(hint)
        raise TypeError(f"no JSON schema of {hint}")


def _descriptions(kind: type) -> dict[str, str]:
    """By attribute, its description in the docstrings of a class and of its bases, in NumPy's form."""
    texts: dict[str, str] = {}
    for base in reversed(kind.__mro__):
        _, _, attributes = inspect.cleandoc(base.__doc__ or "").partition("Attributes\n----------\n")
        for names, text in _ATTRIBUTE.findall(attributes + "\n"):
            texts |= dict.fromkeys(names.split(", "), " ".join(text.split()))
    return texts
