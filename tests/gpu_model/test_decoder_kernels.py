"""Does the GPU model give times of decoders as published ones, to which no preset was fitted?"""

from statistics import median

import pytest
from validate_decoders import attentions, products, read_rows

from pimflow.hardware import GpuSpec


@pytest.mark.long
@pytest.mark.parametrize("gpu, bound", [("h100-sxm", 0.1), ("a100-80gb", 0.22), ("rtx-4090", 0.1)])
def test_products_with_weights_take_about_what_was_measured(gpu, bound):
    errors = [abs(product.error) for product in products() if product.gpu == gpu]
    assert len(errors) >= 8 and median(errors) <= bound and max(errors) <= 0.35


def test_no_card_reads_weights_faster_than_its_peak():
    """A check of the rows: reduction, outputs and time belong together."""
    shares = [product.peak_share for product in products() if product.tokens == 1]
    assert len(shares) == 16 and all(0.5 < share < 1 for share in shares)


def test_every_row_has_a_preset_and_a_source():
    for row in read_rows(steps=True) + read_rows(steps=False):
        assert GpuSpec.load(row["gpu"]).name == row["gpu"] and row["source"]


@pytest.mark.long
def test_attention_takes_about_what_was_measured_where_it_takes_time():
    """Of decoding: kernels of a prompt are others than the measured ones, which docs/validation.md says."""
    rows = [row for row in attentions() if row.queries == 1 and row.measured_us > 300]
    assert len(rows) >= 6 and max(abs(row.error) for row in rows) <= 0.1


@pytest.mark.long
@pytest.mark.parametrize("gpu, bits", [("h100-sxm", 16), ("a100-80gb", 16), ("rtx-4090", 16)])
def test_the_second_baseline_is_the_share_at_which_rows_read_weights(gpu, bits):
    rows = [row for row in products() if row.gpu == gpu and row.tokens == 1 and "70b" not in row.model]
    read_share = sum(row.peak_share * row.measured_us for row in rows) / sum(row.measured_us for row in rows)
    assert GpuSpec.load(gpu).decode_bandwidth_share[f"bits_{bits}"] == pytest.approx(read_share, abs=0.006)
