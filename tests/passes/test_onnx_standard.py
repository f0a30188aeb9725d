"""Do operators compute what the tests of the ONNX standard ask for?"""

import subprocess
from pathlib import Path

import pytest
from onnx_node_tests import BROKEN, CONSTANTS, OTHERS, REFUSED, RIGHT, WRONG, node_tests, outcome, sample

ROOT = Path(__file__).resolve().parents[2]
TESTS = 150  # of each part; `scripts/onnx_node_tests.py` runs all
# What was wrong once: by importers, by kernels, or refused in words that say nothing.
MENDED = {
    "test_affine_grid_3d_align_corners_expanded": CONSTANTS,
    "test_bitcast_scalar_float32_to_int32": RIGHT,
    "test_bitshift_left_int32_shift_ge_width": RIGHT,
    "test_bitcast_2d_float32_to_int32": RIGHT,
    "test_deform_conv_with_multiple_offset_groups": RIGHT,
    "test_dft_irfft": CONSTANTS,
    "test_dynamicquantizelinear": RIGHT,
    "test_identity": RIGHT,
    "test_isinf_negative": RIGHT,
    "test_layer_normalization_2d_axis1": RIGHT,
    "test_mod_float_edge_cases_fmod_0_float32": RIGHT,
    "test_linear_attention_delta": RIGHT,
    "test_lstm_batchwise": CONSTANTS,
    "test_maxpool_with_argmax_2d_precomputed_strides": RIGHT,
    "test_reduce_max_bool_inputs": CONSTANTS,
    "test_reduce_sum_empty_set": CONSTANTS,
    "test_resize_downsample_scales_cubic_A_n0p5_exclude_outside": CONSTANTS,
    "test_resize_downsample_scales_linear": CONSTANTS,
    "test_rms_normalization_3d_axis0_epsilon": RIGHT,
    "test_resize_upsample_sizes_nearest_not_larger": CONSTANTS,
    "test_roialign_mode_max": REFUSED,
    "test_spacetodepth_crd_mode_example": RIGHT,
    "test_split_zero_size_splits_opset18": CONSTANTS,
    "test_swiglu": RIGHT,
    "test_training_dropout_zero_ratio_mask": CONSTANTS,
    "test_tril_neg": CONSTANTS,
}


@pytest.fixture(scope="module")
def tests():
    return node_tests()


@pytest.mark.long
@pytest.mark.parametrize("part", ["first", "second"])
def test_a_sample_drawn_by_the_commit(tests, part):
    head = subprocess.run(["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=False)
    names = sample(list(tests), TESTS, head.stdout.strip() + part)
    found = {name: outcome(tests[name]) for name in names}
    assert {name: reason for name, reason in found.items() if reason[0] in (WRONG, BROKEN)} == {}
    assert {kind for kind, _ in found.values()} <= {RIGHT, CONSTANTS, REFUSED, OTHERS}


@pytest.mark.long
def test_what_was_wrong_once(tests):
    assert {name: outcome(tests[name])[0] for name in MENDED} == MENDED
