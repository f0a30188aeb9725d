import pytest
from refreshes import when_due

from pimflow.hardware.pim import PimSpec


@pytest.fixture(scope="session")
def newton() -> PimSpec:
    return when_due(PimSpec.load("newton-gddr6"))
