"""Is Python's collector as it was, whatever happens meanwhile?"""

import contextlib
import gc

import pytest

from pimflow.host import garbage_collection


@pytest.mark.parametrize("enabled", [True, False])
@pytest.mark.parametrize("fails", [True, False])
def test_the_collector_is_as_before(enabled, fails):
    before = gc.isenabled()
    (gc.enable if enabled else gc.disable)()
    try:
        with contextlib.suppress(ValueError), garbage_collection.pause():
            with garbage_collection.pause():
                assert not gc.isenabled()
            assert not gc.isenabled()
            if fails:
                raise ValueError
        assert gc.isenabled() == enabled
    finally:
        (gc.enable if before else gc.disable)()
