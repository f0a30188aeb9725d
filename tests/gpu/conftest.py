"""One test at a time on the card, whichever process runs it: others would be in what it measures."""

import fcntl

import pytest


@pytest.fixture(autouse=True)
def card(tmp_path_factory):
    with (tmp_path_factory.getbasetemp().parent / "card.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield
