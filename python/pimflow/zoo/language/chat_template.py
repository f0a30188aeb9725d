"""Chat templates: what a model was trained to read around what a user says."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from pimflow.errors import ModelError, UsageError, one_line
from pimflow.zoo.language.gguf_file import open_file

if TYPE_CHECKING:
    from jinja2 import Template

_TOKENS = ("bos", "eos", "pad", "unk")


class ChatTemplate:
    """A template in Jinja, as transformers reads it.

    Parameters
    ----------
    tokens : mapping of str to str
        Texts of special tokens by their names in templates, such as ``bos_token``.
    """

    def __init__(self, source: str, where: str, tokens: Mapping[str, str]) -> None:
        self._source, self._where, self._tokens = source, where, dict(tokens)

    def render(self, prompt: str) -> str:
        """The text that a model reads, up to where its answer begins.

        Raises
        ------
        UsageError
            If Jinja is not installed.
        ModelError
            If the template is wrong, or refuses a message of a user.
        """
        messages = [{"role": "user", "content": prompt}]
        try:
            return self._template().render(messages=messages, add_generation_prompt=True, **self._tokens)
        except UsageError:
            raise
        except Exception as error:  # whatever a template does
            raise ModelError(
                f"{self._where}: its chat template fails: {one_line(str(error))[:100]}"
            ) from None

    def _template(self) -> Template:
        try:
            from jinja2.sandbox import ImmutableSandboxedEnvironment
        except ImportError:
            raise UsageError("chat templates need Jinja: pip install 'pimflow[chat]'") from None
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
        )
        environment.globals["raise_exception"] = _refuse
        environment.filters["tojson"] = lambda value, indent=None: json.dumps(
            value, ensure_ascii=False, indent=indent
        )
        return environment.from_string(self._source)


def _refuse(message: str) -> NoReturn:
    raise ValueError(message)


def folder_template(folder: Path) -> ChatTemplate | None:
    """The template of a folder of Hugging Face's; None without one.

    Raises
    ------
    ModelError
        If a file with it is damaged.
    """
    path, tree = folder / "tokenizer_config.json", {}
    try:
        if path.is_file():
            tree = json.loads(path.read_bytes())
        named = folder / "chat_template.jinja"
        source = named.read_text("utf-8") if named.is_file() else tree.get("chat_template")
    except (OSError, ValueError, AttributeError, RecursionError) as error:
        raise ModelError(
            f"'{folder}': its chat template cannot be read: {one_line(str(error))[:80]}"
        ) from None
    if isinstance(source, list):  # several, each with a name
        named_sources = {
            entry.get("name"): entry.get("template") for entry in source if isinstance(entry, dict)
        }
        source = named_sources.get("default")
    if source is None:
        return None
    if not isinstance(source, str):
        raise ModelError(f"'{path}': chat_template is no text")
    texts = {f"{name}_token": _text(tree.get(f"{name}_token")) for name in _TOKENS}
    return ChatTemplate(source, f"'{folder}'", {name: text for name, text in texts.items() if text})


def _text(token: Any) -> str:
    """The text of a token in a configuration, which may be an object."""
    content = token.get("content") if isinstance(token, dict) else token
    return content if isinstance(content, str) else ""


def gguf_template(path: Path) -> ChatTemplate | None:
    """The template of a GGUF file; None without one. Raises `ModelError` as `open_file`."""
    file = open_file(path)
    source = file.field("tokenizer.chat_template", str)
    if source is None:
        return None
    tokens, texts = file.array("tokenizer.ggml.tokens", str), {}
    for name in _TOKENS:
        index = file.field(
            f"tokenizer.ggml.{name}_token_id".replace("pad", "padding").replace("unk", "unknown"), int
        )
        if index is not None and 0 <= index < len(tokens):
            texts[f"{name}_token"] = tokens[index]
    return ChatTemplate(source, f"'{path}'", texts)
