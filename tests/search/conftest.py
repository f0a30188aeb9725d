import pytest

from pimflow import frontend
from pimflow.relay_passes.regions.extract_regions import extract_regions


@pytest.fixture(scope="session")
def toy():
    """The regions of the zoo's smallest network."""
    return extract_regions(frontend.load("toy").module, "toy")
