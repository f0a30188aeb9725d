import pytest
from hypothesis import settings

# The same examples in every run: a failure is a change of the code, not of the dice.
settings.register_profile("pimflow", derandomize=True, deadline=None)
settings.load_profile("pimflow")


@pytest.fixture(scope="session", autouse=True)
def own_cache(tmp_path_factory):
    """No test reads what a user's searches found, or leaves anything there."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PIMFLOW_CACHE", str(tmp_path_factory.mktemp("cache") / "profiles.sqlite"))
        yield
