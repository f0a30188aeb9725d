"""Does any network that is drawn give what ONNX Runtime gives, on PIM and by what the search finds?"""

import random

import numpy as np
import onnxruntime
import pytest
from drawn_networks import random_network
from length import long_but
from test_launch_counts import pim_plan

from pimflow import frontend, zoo
from pimflow.compiler.build import build
from pimflow.core.output_error import OUTPUT_BOUND, relative_error
from pimflow.hardware import system
from pimflow.pim_backend.runtime import targets
from pimflow.placement import search
from pimflow.relay_passes.regions.extract_regions import extract_regions


@pytest.mark.parametrize("dtype", ["fp32", "fp16"])
@pytest.mark.parametrize("seed", long_but([7002], range(7000, 7016)))
def test_what_onnx_runtime_computes(seed, dtype):
    """In fp16 as far as `OUTPUT_BOUND` allows, which these networks keep to."""
    draw = random.Random(seed)
    model = random_network(draw, others=True)
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    session = onnxruntime.InferenceSession(model.SerializeToString(), options)
    inputs = zoo.example_arrays(zoo.input_types(model), seed=7)
    network, target = frontend.load(model), system(dtype=dtype)
    search_result = search(extract_regions(network.module, "drawn", views=target.uses_views), target)
    planned = pim_plan(search_result) if draw.random() < 0.5 else search_result
    results = build(network, planned, targets.target_by_name("llvm+pim")).infer(inputs)
    for result, expected in zip(results, session.run(None, inputs), strict=True):
        assert (result.shape, result.dtype) == (expected.shape, expected.dtype)
        assert relative_error(result, expected.astype(np.float64)) <= OUTPUT_BOUND[dtype]
