"""The Python API: a file for each command. `pimflow` itself exports the public names."""

from pimflow import moved


def __getattr__(name: str) -> object:
    raise moved.missing(__name__, name)
