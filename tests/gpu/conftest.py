"""A test that measures has the card for itself, whichever processes run the others."""

import fcntl

import pytest


@pytest.fixture(autouse=True)
def card(request, tmp_path_factory):
    alone = request.node.get_closest_marker("alone")
    with (tmp_path_factory.getbasetemp().parent / "card.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX if alone else fcntl.LOCK_SH)
        yield
