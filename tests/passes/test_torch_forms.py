"""Is a network the same for the search, whether it comes as a program of PyTorch or as ONNX?"""

import warnings

import numpy as np
import pytest
from graphs import exported, outputs
from length import long_but

import pimflow
from pimflow import frontend
from pimflow.errors import ModelError, UnsupportedOpError

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.torch


class Attention(torch.nn.Module):
    """Selected by index, as in vision transformers; perhaps with a causal mask."""

    def __init__(self, causal: bool):
        super().__init__()
        self.qkv, self.out, self.causal = torch.nn.Linear(32, 96), torch.nn.Linear(32, 32), causal

    def forward(self, x):
        qkv = self.qkv(x).reshape(1, 16, 3, 2, 16).permute(2, 0, 3, 1, 4)
        attend = torch.nn.functional.scaled_dot_product_attention
        y = attend(qkv[0], qkv[1], qkv[-1], is_causal=self.causal)
        return self.out(y.transpose(1, 2).reshape(1, 16, 32))


class Rounding(torch.nn.Module):
    def forward(self, x):
        places = torch.arange(8, dtype=torch.float32)
        return torch.relu(torch.div(x, 2, rounding_mode="floor") + torch.sin(places))


class Sampling(torch.nn.Module):
    def forward(self, x, grid):
        return torch.relu(torch.nn.functional.grid_sample(x, grid, align_corners=True))


class Turned(torch.nn.Module):
    """A product of a permuted operand, whose weights PyTorch's decomposition repeats for each batch."""

    def __init__(self):
        super().__init__()
        self.before, self.after = torch.nn.Linear(12, 24), torch.nn.Linear(16, 32)

    def forward(self, x):
        return self.after(torch.relu(self.before(x)).transpose(1, 2))


class Rolled(torch.nn.Module):
    """Rolled axes, each second row twice, and rows over their norms."""

    def forward(self, x):
        y = torch.relu(torch.roll(x, (-1, 2), (1, 2)))
        parts = [y[:, 0::2, 0::2], y[:, 1::2, 0::2], y[:, 0::2, 1::2], y[:, 1::2, 1::2]]
        return torch.nn.functional.normalize(torch.cat(parts, -1), dim=-1)


def lines():
    norm = torch.nn.BatchNorm1d(8)
    return torch.nn.Sequential(torch.nn.Conv1d(4, 8, 3), norm, torch.nn.ReLU(), torch.nn.Conv1d(8, 4, 1))


def convolutions(norm):
    return torch.nn.Sequential(torch.nn.Conv2d(3, 8, 1), norm, torch.nn.Conv2d(8, 4, 1))


CASES = {
    "attention": (lambda: Attention(False), ((1, 16, 32),)),
    "causal attention": (lambda: Attention(True), ((1, 16, 32),)),
    "groups": (lambda: convolutions(torch.nn.GroupNorm(2, 8)), ((1, 3, 6, 6),)),
    "channels": (lambda: convolutions(torch.nn.InstanceNorm2d(8, affine=True)), ((1, 3, 6, 6),)),
    "lines": (lines, ((1, 4, 24),)),
    "a norm after a bias": (lambda: convolutions(torch.nn.BatchNorm2d(8)), ((1, 3, 6, 6),)),
    "turned": (Turned, ((3, 16, 12),)),
    "rolled": (Rolled, ((1, 8, 8, 16),)),
    "recurrent": (lambda: torch.nn.GRU(8, 12, 2, batch_first=True), ((1, 3, 8),)),
    "rounding": (Rounding, ((2, 8),)),
    "sampling": (Sampling, ((1, 2, 6, 6), (1, 3, 3, 2))),
}
F = torch.nn.functional
EDGES = torch.tensor([0.0, -0.0, -2.0, -torch.inf, torch.inf, 1.0])


def overwritten(x):
    result = x.clone()
    result[:, [1, -1], :, [2, 3]] = x[0, :2, :, :1].transpose(1, 2)
    return result


FUNCTIONS = {
    "nearest": lambda x: F.interpolate(x, size=(13, 5), mode="nearest"),
    "nearest, of a signal": lambda x: F.interpolate(x[0], scale_factor=1.5, mode="nearest"),
    "nearest-exact": lambda x: F.interpolate(x, size=(13, 5), mode="nearest-exact"),
    "bilinear": lambda x: F.interpolate(x, scale_factor=1.3, mode="bilinear"),
    "linear, corners": lambda x: F.interpolate(x[0], size=20, mode="linear", align_corners=True),
    "trilinear": lambda x: F.interpolate(x[None], scale_factor=1.5, mode="trilinear"),
    "bicubic": lambda x: F.interpolate(x, scale_factor=1.3, mode="bicubic"),
    "antialias": lambda x: F.interpolate(x, size=(5, 4), mode="bilinear", antialias=True),
    "bicubic antialias": lambda x: F.interpolate(x, size=(5, 4), mode="bicubic", antialias=True),
    "one divisor": lambda x: F.avg_pool2d(x, 3, 2, 1, ceil_mode=True, divisor_override=4),
    "one divisor, of volumes": lambda x: F.avg_pool3d(x[None], 2, divisor_override=3),
    "places of maxima": lambda x: F.max_pool2d(x, 3, 2, 1, 2, return_indices=True, ceil_mode=True)[1],
    "maxima of places": lambda x: F.max_pool2d(x, 2, return_indices=True)[0],
    "selu": F.selu,
    "NaN": lambda x: F.elu(x / (x > 1e9)),
    "last index": lambda x: x[:, [-1, 0]],
    "pairs of indices": lambda x: x[:, [-1, 0], [1, -2]],
    "indices apart": lambda x: x[:, [-1, 0, 3], :, [1, -2, 0]],
    "circular": lambda x: F.pad(x, (1, 1, 2, 1), mode="circular"),
    "replicate": lambda x: F.pad(x, (1, 0, 2, 1), mode="replicate"),
    "cut and pad": lambda x: F.pad(x, (1, -1, -2, 0), value=2.0),
    "adaptive maxima": lambda x: F.adaptive_max_pool2d(x, (4, 3), return_indices=True)[0],
    "adaptive places": lambda x: F.adaptive_max_pool2d(x, (4, 3), return_indices=True)[1],
    "bags": lambda x: F.embedding_bag((x[0, 0] * 3).int().abs(), x[0, 1].repeat(2, 1), mode="mean"),
    "maxima of bags": lambda x: F.embedding_bag(
        torch.arange(4), x[0, 0], torch.tensor([0, 0, 3, 4]), mode="max", include_last_offset=True
    ),
    "padded": lambda x: F.embedding_bag(torch.tensor([[0, 3], [2, 3]]), x[0, 1], mode="mean", padding_idx=3),
    "distances of pairs": lambda x: F.pdist(x[0, 0]) + F.pdist(x[0, 0], 1),
    "functions of integers": lambda x: ((x * 9).int().abs() + 1).log() + (x * 9).int() / 2 + (x > 0).exp(),
    "bilinear form": lambda x: F.bilinear(x[0, 0], x[0, 1], x[0, :4, :7, :7]),
    "distances": lambda x: torch.cdist(x[0, 0], x[0, 1]),
    "rectified": lambda x: F.rrelu(x),
    "windows": lambda x: x.unfold(2, 4, 2),
    "complements": lambda x: torch.special.erfc(x) + torch.exp2(x) + torch.hypot(x, x + 1),
    "signs of zero": lambda x: torch.copysign(x + 1, -torch.zeros_like(x)) + torch.copysign(x, 0 * x.abs()),
    "long sides": lambda x: torch.hypot(x * 1e30, 1e30 * x.flip(1)) / 1e30,
    "no side": lambda x: torch.hypot(x.relu(), (-x).relu() * 0) + torch.hypot(x * torch.inf, x * torch.inf),
    "middle of NaN": lambda x: (x / (x.abs() > 0.1)).where(x < 1.5, torch.nan).median(2)[0],
    "signs": lambda x: torch.copysign(x, x.flip(1)) + torch.fmin(x, x.flip(2)),
    "extremes of axes": lambda x: x.amax((1, 2)) - x.amin((1, 2), keepdim=True)[0],
    "products": lambda x: x.prod(1) + x.logsumexp(1),
    "middle": lambda x: x.median(2)[0] + x.kthvalue(3, 2)[0],
    "shifts": lambda x: ((x * 9).int() << 2) + ((x * 9).int() >> 1),
    "one-hot": lambda x: F.one_hot((x * 2).long().abs(), 16).float(),
    "sums at places": lambda x: x.scatter_add(2, (x * 2).long().abs(), x + 1),
    "largest at places": lambda x: x.scatter_reduce(2, (x * 2).long().abs(), x + 1, "amax"),
    "new sums": lambda x: x.scatter_reduce(2, (x * 2).long().abs(), x, "sum", include_self=False),
    "sums of rows": lambda x: x.index_add(1, torch.tensor([0, 3, 3]), x[:, :3]),
    "places apart": overwritten,
    "gamma": lambda x: torch.lgamma(6 * x) + torch.digamma(x) + torch.lgamma(x.abs() * 1e3) / 1e3,
    "ends of gamma": lambda x: torch.cat([f(EDGES) for f in (torch.lgamma, torch.digamma)]),
    "logarithms of sums": lambda x: torch.logcumsumexp(60 * x, 2),
    "of infinities": lambda x: torch.logcumsumexp(EDGES[2:], 0),
    "wide": lambda x: F.conv_transpose3d(x[:, None], x[0, :1, None, :3, :3, None], x[0, 0, 0, :1], 2, 1, 1),
    "groups": lambda x: F.conv_transpose3d(x[..., None], x[0, :, None, :2, :2, None], groups=8, dilation=2),
    "rows": lambda x: x[0].index_put((torch.tensor([-1, 2]),), x[0, :2]),
}


def all_results(x):
    return tuple(function(x) for function in FUNCTIONS.values())


@pytest.mark.long
def test_functions_give_what_pytorch_gives():
    torch.manual_seed(0)
    x = torch.randn(1, 8, 9, 7)
    loaded = frontend.load(exported(all_results, x))
    results = dict(zip(FUNCTIONS, outputs(loaded.module, [x.numpy()]), strict=True))
    for name, expected in zip(FUNCTIONS, all_results(x), strict=True):
        assert results[name].dtype == expected.numpy().dtype, name
        np.testing.assert_allclose(results[name], expected.numpy(), rtol=1e-5, atol=1e-5, err_msg=name)


def test_inputs_on_which_pytorch_fails_are_refused():
    class Quotient(torch.nn.Module):
        def forward(self, x, y):
            return x // y

    ones = torch.ones(2, dtype=torch.int64)
    loaded = frontend.load(torch.export.export(Quotient(), (ones, ones)))
    with pytest.raises(ModelError, match="cannot run it on these inputs: ZeroDivisionError; give inputs"):
        loaded.reference({"x": ones.numpy(), "y": 0 * ones.numpy()})


def test_an_index_by_a_mask_is_refused():
    with pytest.raises(UnsupportedOpError, match="an index by a mask is not supported"):
        frontend.load(exported(lambda x: x[:, torch.tensor([True, False])], torch.ones(1, 2)))


@pytest.mark.long
@pytest.mark.parametrize("case", long_but(["attention", "groups"], CASES))
def test_both_doors_take_the_same_time(case, tmp_path):
    """And what the program computes is what PyTorch computes."""
    make, shapes = case
    torch.manual_seed(0)
    network, operands = make().eval(), tuple(torch.rand(shape) * 2 - 1 for shape in shapes)
    path = tmp_path / "net.onnx"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.onnx.export(network, operands, path, dynamo=False, opset_version=17)
        program = torch.export.export(network, operands)
    times_ns = [pimflow.search(model, modes="gpu").baseline.latency_ns for model in (program, path)]
    assert times_ns[0] == pytest.approx(times_ns[1], rel=0.01)
    loaded = frontend.load(program)
    inputs = loaded.example_inputs()
    results = outputs(loaded.module, list(inputs.values()))
    for result, expected in zip(results, loaded.reference(inputs), strict=True):
        assert np.abs(result - expected).max() <= 1e-5 * max(np.abs(expected).max(), 1)


def test_inputs_are_drawn_by_what_a_program_does_with_them():
    class Restricted(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.table = torch.nn.Embedding(50, 4)

        def forward(self, places, divisor, size):
            return self.table(places.reshape(-1)), 7 // divisor, torch.log(size + 1e-6)

    operands = (torch.zeros(2, 20, dtype=torch.int64), torch.ones(30, dtype=torch.int64), torch.ones(30))
    loaded = frontend.load(torch.export.export(Restricted(), operands))
    inputs = loaded.example_inputs()
    assert loaded.table_rows == {"places": 50}
    assert 2 < inputs["places"].max() < 50
    assert inputs["divisor"].min() >= 1
    assert inputs["size"].min() > 0
    assert all(np.isfinite(result).all() for result in loaded.reference(inputs))
