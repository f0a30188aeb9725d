"""Does the Relay snippet compile networks of the paper, for both targets?

`scripts/verify_modes.py` compiles all of them, in every mode.
"""

from dataclasses import dataclass

import pimflow  # isort: skip  first: it gives TVM the Relay that the others import  # noqa: F401

import numpy as np
import onnx
import onnxruntime
import pytest
import tvm
from tvm import relay
from tvm.contrib import graph_executor

from pimflow import zoo
from pimflow.api import compile as api
from pimflow.compiler import build
from pimflow.frontend import Network
from pimflow.pim_backend.runtime.targets import named_target
from pimflow.placement import Searched

pytestmark = pytest.mark.long

NETWORKS = ("mobilenet-v2", "efficientnet-b0")


@dataclass(frozen=True, kw_only=True)
class Ran:
    """What the snippet gave, and what it found on the way."""

    y: np.ndarray
    reference: np.ndarray
    network: Network
    searched: Searched


@pytest.fixture(scope="module", params=NETWORKS)
def ran(request, tmp_path_factory):
    model, found = zoo.load(request.param), []
    path = tmp_path_factory.mktemp("networks") / "net.onnx"
    onnx.save(model, path)
    x = zoo.example_inputs(model)["input"]
    reference = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"]).run(None, {"input": x})
    search = api.search_network

    def remembered(network, *args, **options):
        found.append((network, search(network, *args, **options)))
        return found[-1][1]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(api, "search_network", remembered)
        y = snippet(path, x)
    ((network, searched),) = found
    return Ran(y=y, reference=reference[0], network=network, searched=searched)


def snippet(path, x) -> np.ndarray:
    model = onnx.load(path)
    shape_dict = {"input": (1, 3, 224, 224)}
    mod, params = relay.frontend.from_onnx(model, shape_dict)
    with tvm.transform.PassContext(opt_level=3):
        lib = relay.build(mod, target="llvm+pim", params=params)
    dev = tvm.cpu()
    m = graph_executor.GraphModule(lib["default"](dev))
    m.set_input("input", x)
    m.run()
    assert m.get_num_outputs() == 1
    return m.get_output(0).numpy()


def test_the_classic_snippet(ran):
    assert ran.y.shape == ran.reference.shape
    assert np.abs(ran.y - ran.reference).max() <= 2e-3 * np.abs(ran.reference).max()


def test_its_kernels_build_for_cuda(ran):
    """What is searched for does not depend on the target."""
    kernels = build.build(ran.network, ran.searched, named_target("cuda+pim")).kernels
    assert "mma_sync" in kernels.source  # tensor cores
    assert kernels.compiler or "found" in kernels.flaw
