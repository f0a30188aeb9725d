import pytest

from pimflow.hardware.pim import PimSpec


@pytest.fixture(scope="session")
def newton() -> PimSpec:
    return PimSpec.load("newton-gddr6")
