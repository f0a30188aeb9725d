"""``pimflow generate``: text from a language model, by the commands of its plan."""

from __future__ import annotations

import argparse
from typing import Any

from pimflow.cli import options, output
from pimflow.cli.command_parser import CommandParser
from pimflow.errors import UsageError

SUMMARY = "write text with a language model, token by token, and say what that takes"


def add_arguments(sub: CommandParser) -> None:
    """Add the arguments of the command, which `run` takes."""
    sub.open_with(
        "--prompt", "--tokens", "-n", "--context", "--batch", "--system", "--pim-channels", "--json"
    )
    sub.positional("model", "MODEL", "language model of the zoo, .onnx decoder with a cache, or .gguf file")
    again = "; repeat it for several at once, of any lengths"
    sub.option(
        "network", "--prompt", metavar="TEXT", action="append", help=f"what comes first, as text{again}"
    )
    sub.option(
        "network", "--tokens", metavar="ID,…", action="append", help=f"the same as numbers of tokens{again}"
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
    from pimflow.api.generate import generate

    prompts = args.prompt or [""] * len(tokens or [""])
    begun = prompts[:1]  # printed with the first new token, when arguments are known to be valid

    def show(text: str) -> None:
        """Print a piece of text, before the first one the prompt."""
        print("".join(begun) + text, end="", flush=True)
        begun.clear()

    told = {} if args.json else {"on_text": show}
    with output.status(args.quiet) as progress, options.profiling(args) as profiling:
        found = generate(
            args.model,
            n=args.n,
            prompt=args.prompt and _one(args.prompt),
            tokens=tokens and _one(tokens),
            context=args.context,
            batch=args.batch,
            target_system=target_system,
            profiling=profiling,
            progress=progress,
            **told,
            **goal,
        )
    if args.json:
        output.print_json(found.to_json())
        return
    print("\n" if found.tokens else "", end="")
    for begins, request in zip(prompts[1:], found.requests[1:]):
        if request.tokens:
            text = " ".join(map(str, request.tokens)) if request.text is None else request.text
            print(f"{begins}{text}")
    print(found.table())


def _one(given: list[Any]) -> Any:
    """The element of a list of one; else the list."""
    return given[0] if len(given) == 1 else given


def _tokens(text: str) -> list[int]:
    """Parse the token numbers of ``--tokens``."""
    parts = [part.strip() for part in text.split(",")] if text.strip() else []
    if not all(part.isdecimal() for part in parts):
        raise UsageError(f"--tokens {text}: give numbers, such as 84,104,101")
    return [int(part) for part in parts]
