"""What pimflow does, a file a command. `pimflow` itself hands on the public names."""

from pimflow import moved


def __getattr__(name: str) -> object:
    raise moved.missing(__name__, name)
