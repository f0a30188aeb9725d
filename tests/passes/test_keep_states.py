"""Do steps over caches that stay in place see the tokens that the network sees in caches that grow?"""

import numpy as np
import onnx
import pytest
import tvm
from decoders import DecoderModel
from graphs import PLAIN_CODE
from onnx import TensorProto, helper, numpy_helper
from tvm import relax

from pimflow import frontend
from pimflow.compiler import phases
from pimflow.errors import UnsupportedOpError
from pimflow.frontend import Network

CONTEXT = 8
CACHES = ("past_key_values.0.key", "past_key_values.0.value")


def decoder(past: int, mask: str) -> onnx.ModelProto:
    return DecoderModel(kv_heads=2, past=past, mask=mask).model()


class StepMachine:
    """A step of a network whose caches stay in place."""

    def __init__(self, network: Network) -> None:
        self.network = network
        self.machine = relax.VirtualMachine(phases.build(network.module, PLAIN_CODE), tvm.cpu())
        shapes = {state.name: network.inputs[state.name][0] for state in network.states}
        self.caches = {n: tvm.runtime.tensor(np.full(dims, 9, "float32")) for n, dims in shapes.items()}

    def __call__(self, **values: np.ndarray) -> np.ndarray:
        """The first result; what is no cache comes by name."""
        tensors = {name: tvm.runtime.tensor(array) for name, array in values.items()} | self.caches
        operands = [tensors[name] for name in self.network.inputs]
        return self.machine["main"](*operands)[0].numpy()


@pytest.mark.long
def test_a_window_from_lengths_follows_the_position():
    """Its constant mask hides the first places of a full cache, where the step's tokens begin."""
    step, past = StepMachine(frontend.load(decoder(CONTEXT - 1, "window"), context=CONTEXT)), None
    for position, token in enumerate([3, 1, 4, 1, 5, 9, 2, 6]):
        ids, visible = np.array([[token]]), (np.arange(CONTEXT) <= position).astype("float32")
        logits = step(input_ids=ids, attention_mask=visible[None], position=np.array([position]))
        if position:  # ONNX has no tensors without elements
            network = frontend.load(decoder(position, "window"))
            mask = np.ones((1, position + 1), "float32")
            expected = network.reference({"input_ids": ids, "attention_mask": mask, **past})
            np.testing.assert_allclose(logits, expected[0], rtol=1e-4, atol=1e-5)
        past = {name: step.caches[name].numpy()[:, :, : position + 1] for name in CACHES}


def test_another_mask_from_lengths_is_refused():
    with pytest.raises(UnsupportedOpError, match=r"'layer0.values': its mask follows from lengths by"):
        frontend.load(decoder(CONTEXT - 1, "second"), context=CONTEXT)
    assert frontend.load(decoder(CONTEXT - 1, "second")).states == ()


@pytest.mark.long
def test_an_input_called_position_is_the_models_own():
    """The one that is added has another name, and alone says where the tokens are."""
    base = decoder(CONTEXT - 1, "")
    table = np.random.default_rng(5).normal(size=(32, 32)).astype("float32")
    base.graph.input.append(helper.make_tensor_value_info("position", TensorProto.INT64, [1, 1]))
    base.graph.initializer.append(numpy_helper.from_array(table, "table"))
    first = base.graph.node[0].output[0]
    for node in base.graph.node:
        node.input[:] = ["placed" if name == first else name for name in node.input]
    base.graph.node.insert(1, helper.make_node("Gather", ["table", "position"], ["rows"], "rows"))
    base.graph.node.insert(2, helper.make_node("Add", [first, "rows"], ["placed"], "placed"))
    network = frontend.load(base, context=CONTEXT)
    assert (network.position, network.inputs["position"]) == ("position_", ((1, 1), "int64"))
    rng, full = np.random.default_rng(0), CONTEXT - 1
    step = StepMachine(network)
    past = {name: rng.normal(size=(1, 2, full, 8)).astype("float32") for name in CACHES}
    for name, values in past.items():
        whole = np.concatenate([values, np.full((1, 2, 1, 8), 7, "float32")], axis=2)
        step.caches[name] = tvm.runtime.tensor(whole)
    inputs = {"input_ids": np.array([[3]]), "position": np.array([[29]])}
    values = {name: tensor.numpy() for name, tensor in step.caches.items()}
    expected = network.reference({**inputs, **values, "position_": np.array([full])})
    logits = step(**inputs, position_=np.array([full]))
    np.testing.assert_allclose(logits, expected[0], rtol=1e-4, atol=1e-5)
    assert network.example_inputs()["position_"] == full
