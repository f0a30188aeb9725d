"""Is a module of PyTorch compiled as it is, and called as it is called?"""

import re
from importlib.metadata import EntryPoint
from pathlib import Path

import pytest

import pimflow
from pimflow.errors import ModelError, UnsupportedOpError, UsageError

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.torch


class Branches(torch.nn.Module):
    """Nested arguments and results; one argument is no tensor."""

    def __init__(self):
        super().__init__()
        self.stem, self.head = torch.nn.Conv2d(3, 8, 1), torch.nn.Linear(8, 4)
        self.norm = torch.nn.BatchNorm2d(8)

    def forward(self, images, is_scaled, *, options=None):
        features = self.norm(self.stem(images["left"] + images["right"])).relu().mean((2, 3))
        features = features * options["scale"] if is_scaled else features
        return {"features": features, "scores": [self.head(features), (features.sum(1),)]}


def images(size):
    return {"right": torch.rand(1, 3, size, size), "left": torch.rand(1, 3, size, size)}


@pytest.fixture(scope="module")
def module():
    torch.manual_seed(0)
    return Branches().eval()


def assert_same(result, expected):
    tree = torch.utils._pytree
    (leaves, spec), (expected_leaves, expected_spec) = tree.tree_flatten(result), tree.tree_flatten(expected)
    assert spec == expected_spec
    for leaf, expected_leaf in zip(leaves, expected_leaves, strict=True):
        assert leaf.shape == expected_leaf.shape
        assert (leaf - expected_leaf).abs().max() < 2e-3 * expected_leaf.abs().max()


@pytest.mark.long
def test_results_come_back_in_the_form_that_the_module_gives(module):
    size = torch.export.Dim("size")
    shapes = {"images": {name: {2: size, 3: size} for name in ("left", "right")}}
    options = {"scale": torch.full((1,), 2.0)}
    compiled = pimflow.compile(
        module,
        (images(6), True),
        kwargs={"options": options},
        dynamic_shapes={**shapes, "is_scaled": None, "options": {"scale": None}},
        shapes={"images_left": (1, 3, 8, 8), "images_right": (1, 3, 8, 8)},
        conventions="none",
    )
    assert compiled.report.model == "Branches"
    names = [region.name for region in compiled.report.regions]
    assert {"stem", "head", "mean"} <= {*names} and not [name for name in names if name.startswith("lv")]
    arguments, changed = images(8), {"scale": torch.full((1,), 3.0)}
    with torch.no_grad():
        assert_same(compiled(arguments, True, options=changed), module(arguments, True, options=changed))
    with pytest.raises(UsageError, match=r"compiled for an argument of True, not False"):
        compiled(arguments, False, options=changed)
    with pytest.raises(UsageError, match=r"form {'.*': \*, '.*': \*}, \*, options=.*, not \*"):
        compiled(arguments["left"])


@pytest.mark.long
def test_a_network_that_is_no_module_is_not_called():
    with pytest.raises(UnsupportedOpError, match=r"no program of PyTorch; run its directory by pimflow\.run"):
        pimflow.compile("toy", conventions="none")()


class Branching(torch.nn.Module):
    def forward(self, x):
        return x + 1 if x.sum() > 0 else x


WRONG = {
    "no arguments": (lambda m: pimflow.compile(m), UsageError, r"give them, as in \(x,\)"),
    "two places": (lambda _: pimflow.compile("toy", "a", out="b"), UsageError, "out is given twice"),
    "a name": (lambda _: pimflow.compile("toy", args=(1,)), UsageError, r"args belongs to a torch"),
    "a search": (lambda m: pimflow.search(m), UsageError, r"compile\(module, \(x,\)\)"),
    "training": (
        lambda m: pimflow.compile(Branches(), ({**images(4)}, False)),
        UsageError,
        r"Branches is in training mode, where batch_norm differs; call its eval\(\) first",
    ),
    "branches": (
        lambda _: pimflow.compile(Branching(), (torch.ones(2),)),
        ModelError,
        "torch.export cannot export Branching: .*data-dependent",
    ),
}


@pytest.mark.parametrize("case", WRONG)
def test_what_cannot_be_exported_is_refused_in_a_line(case, module):
    call, kind, pattern = WRONG[case]
    with pytest.raises(kind, match=pattern) as caught:
        call(module)
    assert "\n" not in str(caught.value)


def test_the_backend_is_the_one_that_torch_compile_finds_by_its_name():
    group = "torch_dynamo_backends"
    declared = (Path(__file__).parents[2] / "pyproject.toml").read_text()
    value = re.search(rf'entry-points\.{group}]\npimflow = "(.*)"', declared)[1]
    entry = EntryPoint("pimflow", value, group)
    assert entry.load() is pimflow.torch_backend


def test_torch_compile_computes_with_new_shapes_and_new_weights(module):
    fast = torch.compile(module, backend=pimflow.torch_backend, options={"modes": "gpu,pim"})
    with pytest.raises(UsageError, match=r"computes no gradients: call the module within torch\.no_grad\(\)"):
        fast(images(4), False)
    with torch.no_grad():
        for size in (4, 6):
            arguments = images(size)
            assert_same(fast(arguments, False), module(arguments, False))
        module.head.weight.mul_(2)
        assert_same(fast(arguments, False), module(arguments, False))
