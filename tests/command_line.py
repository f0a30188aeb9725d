"""The command in this process: what it prints, and with which exit code it ends."""

import json
from typing import Any

from pimflow.commands.main import main

ALONE = ("--conventions", "none")  # for `compile`: no search under other conventions than the system's


def run(capsys, *argv: object) -> tuple[int, str, str]:
    """Exit code, standard output and standard error; the first of `argv` may be several words."""
    words = [word for words in argv[:1] for word in str(words).split()] + list(map(str, argv[1:]))
    try:
        code = main(words)
    except SystemExit as exit_:
        code = exit_.code
    out, err = capsys.readouterr()
    return code, out, err


def run_json(capsys, *argv: object) -> Any:
    """What a command that succeeds prints with ``--json``."""
    code, out, err = run(capsys, *argv, "--json", "--quiet")
    assert code == 0, err
    return json.loads(out)


def error_line(capsys, code: int, *argv: object) -> str:
    """The line on standard error of a command that ends with `code`, and prints nothing else."""
    exit_code, out, err = run(capsys, *argv)
    assert (exit_code, out) == (code, "") and err.startswith("pimflow: error: ") and err.count("\n") == 1, err
    return err
