"""``pimflow models``: the networks and language models of the zoo."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from pimflow.commands.command_line import output
from pimflow.commands.command_line.command_parser import CommandParser

if TYPE_CHECKING:
    from pimflow.zoo.language.decoder import Decoder

SUMMARY = "list the networks of the zoo"


def add_arguments(sub: CommandParser) -> None:
    """Add no arguments: the command has none."""


def run(args: argparse.Namespace) -> None:
    """Print a line for every network, and for every language model."""
    from pimflow import zoo

    rows = [zoo.describe(name) for name in zoo.names()]
    decoders = [zoo.decoder(name) for name in zoo.decoder_names()]
    if args.json:
        decoder_rows = [{**vars(decoder), **_counts(decoder)} for decoder in decoders]
        output.print_json([*(dict(row.__dict__) for row in rows), *decoder_rows])
        return
    print(f"{'model':<16} {'parameters':>12} {'GMAC':>8}  inputs")
    for row in rows:
        shapes = ", ".join(f"{name}={','.join(map(str, shape))}" for name, shape in row.inputs.items())
        trained = "  trained (docs/zoo.md)" if row.trained else ""
        print(f"{row.name:<16} {row.parameters:>12,} {row.macs / 1e9:>8.3f}  {shapes}{trained}")
    print(f"\n{'language model':<16} {'parameters':>14} {'GMAC':>8}  blocks")
    for decoder in decoders:
        heads = (
            f"{decoder.heads} heads"
            if decoder.group == 1
            else f"{decoder.heads} heads on {decoder.kv_heads} of keys"
        )
        sizes = f"{decoder.layers} of {decoder.hidden}, {heads}, {decoder.vocabulary} tokens"
        trained = "  trained (docs/zoo.md)" if decoder.trained else ""
        print(
            f"{decoder.name:<16} {decoder.parameters:>14,} {decoder.macs_per_token / 1e9:>8.3f}  "
            f"{sizes}{trained}"
        )


def _counts(decoder: Decoder) -> dict[str, int]:
    """Figures that follow from the sizes of a language model."""
    return {
        "parameters": decoder.parameters,
        "macs": decoder.macs_per_token,
        "kv_bytes_per_token": decoder.kv_bytes_per_token(),
    }
