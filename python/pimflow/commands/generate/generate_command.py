"""``pimflow generate``: text from a language model, by the commands of its plan."""

from __future__ import annotations

import argparse

from pimflow.commands.command_line import output
from pimflow.commands.command_line.command_parser import CommandParser

SUMMARY = "write text with a language model, token by token, and say what that takes"


def add_arguments(sub: CommandParser) -> None:
    """Add the arguments of the command, which `run` takes."""
    from pimflow.commands.command_line import options
    from pimflow.commands.generate.options import GenerateOptions

    sub.show_first(
        "--prompt", "--tokens", "-n", "--chat", "--context", "--batch", "--system", "--pim-channels", "--json"
    )
    sub.positional(
        "model",
        "MODEL",
        "language model of the zoo, .onnx, .pt2 or .gguf decoder with a cache, or folder with config.json",
    )
    sub.add_fields(GenerateOptions, "prompt", "tokens", action="append")
    sub.add_fields(GenerateOptions, "n", required=True)
    sub.add_fields(GenerateOptions, "context", "batch", "temperature", "top_k", "top_p", "seed")
    sub.add_fields(GenerateOptions, "stop", action="append")
    sub.add_fields(GenerateOptions, "chat", "tokenizer", "weight_type", "activation_type", "kv_cache_dtype")
    sub.add_fields(GenerateOptions, "devices", "parallel", "link", "assume_room")
    options.system_options(sub)
    options.goal_options(sub)
    options.profiling_options(sub)


def run(args: argparse.Namespace) -> None:
    """Generate text, print it as it comes, and print the figures."""
    from pimflow.commands.command_line import options
    from pimflow.commands.generate.generate import generate
    from pimflow.commands.generate.options import GenerateOptions
    from pimflow.core.goal import GoalOptions

    target_system = options.target_system(args)
    keywords = args.parser.keywords(args, GenerateOptions, GoalOptions)
    for name in ("prompt", "tokens"):
        if len(keywords[name] or ()) == 1:
            (keywords[name],) = keywords[name]
    prompts = args.prompt or [""] * len(args.tokens or [""])
    end = "\n" if args.chat else ""  # of what a user says
    unprinted = prompts[:1]  # printed with the first new token, when arguments are known to be valid

    def show(text: str) -> None:
        """Print a piece of text, before the first one the prompt."""
        print("".join(prompt + end for prompt in unprinted) + text, end="", flush=True)
        unprinted.clear()

    with output.status(args) as progress, options.profiling(args) as profiling:
        generation = generate(
            args.model,
            system=target_system,
            profiling=profiling,
            progress=progress,
            on_text=(lambda _: None) if args.json else show,
            **keywords,
        )
    if args.json:
        output.print_json(generation.to_json())
        return
    print("\n" if generation.tokens else "", end="")
    for prompt, request in zip(prompts[1:], generation.requests[1:]):
        if request.tokens:
            text = " ".join(map(str, request.tokens)) if request.text is None else request.text
            print(f"{prompt}{end}{text}")
    print(generation.table())
