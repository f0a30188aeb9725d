"""Does the GPU model give times of decoders as published ones, to which no preset was fitted?"""

from statistics import median

import pytest
from validate_decoders import products, read_rows

from pimflow.hardware import GpuSpec


@pytest.mark.parametrize("gpu, bound", [("h100-sxm", 0.16), ("rtx-4090", 0.1)])
def test_products_with_weights_take_about_what_was_measured(gpu, bound):
    errors = [abs(product.error) for product in products() if product.gpu == gpu]
    assert len(errors) >= 8 and median(errors) <= bound and max(errors) <= 0.35


def test_no_card_reads_weights_faster_than_its_peak():
    """A check of the rows: reduction, outputs and time belong together."""
    shares = [product.peak_share for product in products() if product.tokens == 1]
    assert len(shares) == 8 and all(0.5 < share < 1 for share in shares)


def test_every_row_has_a_preset_and_a_source():
    for row in read_rows(steps=True) + read_rows(steps=False):
        assert GpuSpec.load(row["gpu"]).name == row["gpu"] and row["source"]
