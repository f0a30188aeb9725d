"""``pimflow generate``: text from a language model, by the commands of its plan."""

from __future__ import annotations

import argparse
from typing import Any

from pimflow.commands.command_line import options, output
from pimflow.commands.command_line.command_parser import CommandParser
from pimflow.errors import UsageError

SUMMARY = "write text with a language model, token by token, and say what that takes"


def add_arguments(sub: CommandParser) -> None:
    """Add the arguments of the command, which `run` takes."""
    sub.show_first(
        "--prompt", "--tokens", "-n", "--context", "--batch", "--system", "--pim-channels", "--json"
    )
    sub.positional("model", "MODEL", "language model of the zoo, .onnx decoder with a cache, or .gguf file")
    repeat_hint = "; repeat it for several at once, of any lengths"
    sub.option(
        "network", "--prompt", metavar="TEXT", action="append", help=f"what comes first, as text{repeat_hint}"
    )
    sub.option(
        "network",
        "--tokens",
        metavar="ID,…",
        action="append",
        help=f"the same as numbers of tokens{repeat_hint}",
    )
    sub.option(
        "network",
        "-n",
        metavar="N",
        type=int,
        required=True,
        help="how many new tokens; text is printed before its last check: exit code 5 says that it is wrong",
    )
    sub.option(
        "network",
        "--context",
        metavar="N",
        type=int,
        help="tokens that the caches have room for (default: the longest prompt's and the new ones)",
    )
    sub.option(
        "network", "--batch", metavar="B", type=int, default=1, help="sequences at once, from the same prompt"
    )
    options.system_options(sub)
    options.goal_options(sub, errors=False)
    options.profiling_options(sub)


def run(args: argparse.Namespace) -> None:
    """Generate text, print it as it comes, and print the figures."""
    tokens, goal = args.tokens and list(map(_tokens, args.tokens)), options.goal(args)
    target_system = options.target_system(args)
    from pimflow.commands.generate.generate import generate

    prompts = args.prompt or [""] * len(tokens or [""])
    unprinted = prompts[:1]  # printed with the first new token, when arguments are known to be valid

    def show(text: str) -> None:
        """Print a piece of text, before the first one the prompt."""
        print("".join(unprinted) + text, end="", flush=True)
        unprinted.clear()

    with output.status(args.quiet) as progress, options.profiling(args) as profiling:
        generation = generate(
            args.model,
            n=args.n,
            prompt=args.prompt and _unwrap_single(args.prompt),
            tokens=tokens and _unwrap_single(tokens),
            context=args.context,
            batch=args.batch,
            target_system=target_system,
            profiling=profiling,
            progress=progress,
            on_text=(lambda _: None) if args.json else show,
            **goal,
        )
    if args.json:
        output.print_json(generation.to_json())
        return
    print("\n" if generation.tokens else "", end="")
    for prompt, request in zip(prompts[1:], generation.requests[1:]):
        if request.tokens:
            text = " ".join(map(str, request.tokens)) if request.text is None else request.text
            print(f"{prompt}{text}")
    print(generation.table())


def _unwrap_single(values: list[Any]) -> Any:
    """The element of a list of one; else the list."""
    return values[0] if len(values) == 1 else values


def _tokens(text: str) -> list[int]:
    """Parse the token numbers of ``--tokens``."""
    parts = [part.strip() for part in text.split(",")] if text.strip() else []
    if not all(part.isdecimal() for part in parts):
        raise UsageError(f"--tokens {text}: give numbers, such as 84,104,101")
    return [int(part) for part in parts]
