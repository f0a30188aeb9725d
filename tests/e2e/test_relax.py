"""Do Relax and PyTorch users get the same compiler: a pipeline for ``tvm.compile``, modules, programs?"""

import io
import logging

import numpy as np
import pytest
import tvm
from branching import randomly_wired
from tvm import relax
from tvm.relax.frontend import onnx as relax_onnx

import pimflow
from pimflow import zoo
from pimflow.errors import ModelError, PlanError, UnknownNameError, UnsupportedOpError, UsageError


@pytest.fixture(scope="module")
def module():
    return relax_onnx.from_onnx(zoo.load("toy"))


def run(executable, *inputs):
    result = relax.VirtualMachine(executable, tvm.cpu())["main"](*map(tvm.runtime.tensor, inputs))
    return result.numpy()


@pytest.mark.long
def test_a_pipeline_for_tvm_compile(module):
    system = pimflow.system(gpu="rtx-2060-pim32", pim="newton-gddr6")
    plan = pimflow.search(module, system)
    assert "PIM" in {choice.mode for choice in plan.plan.choices}
    x = zoo.example_inputs(zoo.load("toy"))["input"]
    reference = run(tvm.compile(relax.transform.DecomposeOpsForInference()(module), "llvm"), x)
    for chosen in (plan, plan.plan, None):
        pipeline = pimflow.relax_pipeline(system, chosen)
        y = run(tvm.compile(module, target="llvm+pim", relax_pipeline=pipeline), x)
        assert 0 < np.abs(y - reference).max() <= 2e-3 * np.abs(reference).max()  # PIM rounds to fp16


def test_targets_are_known_by_name():
    assert "pim" in list(tvm.target.Target("cuda+pim").keys)
    assert tvm.target.Target("llvm+pim").kind.name == "llvm"


def test_wrong_uses_of_the_pipeline(module):
    with pytest.raises(UsageError, match="context has no effect"):
        pimflow.relax_pipeline(context=8)
    with pytest.raises(UsageError, match=r"llvm\+pim"):
        tvm.compile(module, target="llvm", relax_pipeline=pimflow.relax_pipeline())
    other_plan = pimflow.search(randomly_wired(3, seed=1)).plan
    with pytest.raises(PlanError, match="another network"):
        tvm.compile(module, target="llvm+pim", relax_pipeline=pimflow.relax_pipeline(plan=other_plan))
    with pytest.raises(UnknownNameError, match="label"):
        pipeline = pimflow.relax_pipeline(solver="labels")
        tvm.compile(module, target="llvm+pim", relax_pipeline=pipeline)


def test_a_module_is_compiled_and_verified_against_tvm(module, tmp_path):
    compiled = pimflow.compile(module, tmp_path / "out", conventions="none")
    assert compiled.verification.is_verified
    assert pimflow.run(tmp_path / "out")[0].shape == (1, 10)


def test_open_shapes_are_named_and_can_be_fixed():
    @tvm.script.ir_module
    class Open:
        @tvm.script.relax.function
        def main(x: tvm.script.relax.Tensor(("n", 16), "float32")):
            with tvm.script.relax.dataflow():
                y = tvm.script.relax.nn.relu(x)
                tvm.script.relax.output(y)
            return y

    with pytest.raises(ModelError, match="--shape x="):
        pimflow.search(Open)
    assert len(pimflow.search(Open, shapes={"x": (2, 16)}).graph.regions) == 1
    with pytest.raises(ModelError, match="not"):
        pimflow.search(Open, shapes={"x": (2, 17)})
    with pytest.raises(UnknownNameError, match="x"):
        pimflow.search(Open, shapes={"X": (2, 16)})


def test_a_module_without_main():
    with pytest.raises(ModelError, match="main"):
        pimflow.search(tvm.IRModule())


@pytest.fixture(scope="module")
def program():
    torch = pytest.importorskip("torch")

    class TorchNet(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.features = torch.nn.Sequential(
                torch.nn.Conv2d(3, 32, 3, padding=1),
                torch.nn.BatchNorm2d(32),
                torch.nn.ReLU6(),
                torch.nn.Conv2d(32, 64, 1),
            )
            self.fc = torch.nn.Linear(64, 1000)

        def forward(self, x):
            return self.fc(self.features(x).mean((2, 3)))

    torch.manual_seed(0)
    return torch.export.export(TorchNet().eval(), (torch.zeros(1, 3, 8, 8),))


@pytest.mark.torch
@pytest.mark.long
def test_an_exported_program_keeps_its_layers(program, tmp_path):
    torch = pytest.importorskip("torch")
    torch.export.save(program, tmp_path / "net.pt2")
    for model in (program, tmp_path / "net.pt2"):
        compiled = pimflow.compile(model, tmp_path / "out", conventions="none")
        assert compiled.verification.is_verified
        names = [choice.region for choice in compiled.plan.choices]
        assert {"features.0", "features.3", "fc"} <= set(names)


@pytest.mark.long
@pytest.mark.torch
def test_a_damaged_program_is_one_line(tmp_path, monkeypatch):
    """PyTorch logs a traceback for each form that the file has not."""
    pytest.importorskip("torch")
    (tmp_path / "bad.pt2").write_bytes(b"no archive")
    logged = io.StringIO()
    monkeypatch.setattr(logging.getLogger("torch.export"), "handlers", [logging.StreamHandler(logged)])
    with pytest.raises(ModelError, match=r"bad\.pt2"):
        pimflow.compile(tmp_path / "bad.pt2")
    assert not logged.getvalue() and not logging.getLogger("torch.export").disabled


@pytest.fixture(scope="module")
def step(tmp_path_factory):
    """Of a decoder in PyTorch: four heads of queries on two of keys and values, over a past of any length."""
    torch = pytest.importorskip("torch")

    class TorchStep(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.query, self.key, self.value = (torch.nn.Linear(32, n, bias=False) for n in (32, 16, 16))
            self.out = torch.nn.Linear(32, 32, bias=False)

        def forward(self, x, past_key, past_value):
            batch, tokens, _ = x.shape
            heads = (batch, tokens, -1, 8)
            query, key, value = (f(x).view(heads).transpose(1, 2) for f in (self.query, self.key, self.value))
            key, value = torch.cat([past_key, key], 2), torch.cat([past_value, value], 2)
            attention = torch.nn.functional.scaled_dot_product_attention(query, key, value, enable_gqa=True)
            return x + self.out(attention.transpose(1, 2).reshape(batch, tokens, 32)), key, value

    torch.manual_seed(0)
    module, path = TorchStep().eval(), tmp_path_factory.mktemp("step") / "step.pt2"
    example_inputs = (torch.randn(1, 1, 32), torch.randn(1, 2, 7, 8), torch.randn(1, 2, 7, 8))
    past = torch.export.Dim("past", min=1, max=4096)
    open_past = {"x": None, "past_key": {2: past}, "past_value": {2: past}}
    torch.export.save(torch.export.export(module, example_inputs, dynamic_shapes=open_past), path)
    return module, path


@pytest.mark.long
@pytest.mark.torch
def test_an_exported_step_keeps_its_caches(step, tmp_path):
    """Token by token, as PyTorch has it with caches that grow."""
    torch = pytest.importorskip("torch")
    module, path = step
    report = pimflow.compile(path, tmp_path / "out", context=6, conventions="none").report
    assert report.verification.verified is True and report.verification.timing_violations == 0
    session = pimflow.Session(tmp_path / "out")
    grown = [torch.zeros(1, 2, 0, 8)] * 2
    for position, token in enumerate(torch.randn(6, 1, 1, 32)):
        outputs = session.run({"x": token.numpy(), "position": np.array([position])})
        with torch.no_grad():
            expected, *grown = module(token, *grown)
        np.testing.assert_allclose(outputs["add"], expected, atol=2e-3 * abs(expected).max())
    states = {"past_key": "cat", "past_value": "cat_1"}
    with_states = pimflow.search(path, context=6, states=states)
    assert pimflow.search(path, context=6).graph.regions == with_states.graph.regions


@pytest.mark.long
@pytest.mark.torch
@pytest.mark.parametrize(
    ("keywords", "says"),
    [
        ({"context": 1}, "--context 1: give more than the 1 of a step"),
        ({"context": 6, "states": {"past_key": "dog"}}, "unknown output 'dog'"),
        ({"context": 6, "states": {"past_key": "add"}}, "output 0 is not input 'past_key' with new"),
        ({"states": {"past_key": "cat"}}, "states need a context"),
        ({"context": 6, "shapes": {"past_key": (1, 2, 3, 8)}}, "past_value"),
        ({"shapes": {"past_key": (1, 2, 3, 8), "past_value": (1, 2, 4, 8)}}, "past_value"),
    ],
)
def test_caches_that_a_step_has_not_are_refused(step, keywords, says):
    with pytest.raises((ModelError, UnsupportedOpError, UsageError), match=says):
        pimflow.search(step[1], **keywords)


@pytest.mark.torch
@pytest.mark.long
def test_a_module_imported_from_torch(program):
    from tvm.relax.frontend.torch import from_exported_program

    module = from_exported_program(program)
    assert pimflow.compile(module, conventions="none").verification.is_verified


def test_a_missing_program_is_named(tmp_path):
    with pytest.raises(ModelError, match=r"nowhere\.pt2"):
        pimflow.compile(tmp_path / "nowhere.pt2")
