"""Are programs of PyTorch in bf16, fp16 or fp64 computed in fp32, with results of their own types?"""

import ml_dtypes
import numpy as np
import pytest
from graphs import exported, outputs
from length import long_but

import pimflow
from pimflow import frontend
from pimflow.errors import UnsupportedOpError

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.torch


class Norm(torch.nn.Module):
    """A convolution with its norm, whose input has a name that Python has too."""

    def __init__(self):
        super().__init__()
        self.layer, self.norm = torch.nn.Conv1d(4, 6, 3), torch.nn.BatchNorm1d(6)

    def forward(self, input):
        y = self.norm(self.layer(input))
        return y.softmax(1) * torch.arange(6, dtype=y.dtype)[:, None], y.float().argmax(1)


class Cases(torch.nn.Module):
    """What rounds on purpose, and what fp32 would change."""

    def forward(self, x, count):
        thirds = (count.double() / 3).floor().long()
        return x.bfloat16().float(), x.half().argmax(-1), x.half(), thirds, x.double().mean(-1)


class CountingProgram(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("total", torch.ones(3, dtype=torch.bfloat16))

    def forward(self, x):
        return self.total.add_(x) * 2


def results(program, *operands):
    """What the imported program computes, and its reference."""
    loaded = frontend.load(program)
    operands = [x.astype(dtype) for x, (_, dtype) in zip(operands, loaded.inputs.values(), strict=True)]
    return outputs(loaded.module, operands), loaded.reference(dict(zip(loaded.inputs, operands)))


@pytest.mark.parametrize("kind", long_but(["bfloat16"], ["bfloat16", "float16", "float64"]))
def test_all_is_computed_in_fp32(kind):
    torch.manual_seed(0)
    x = torch.randn(2, 4, 9).to(getattr(torch, kind))
    program = torch.export.export(Norm().eval().to(x.dtype), (x,))
    loaded = frontend.load(program)
    assert loaded.inputs == {"input": ((2, 4, 9), "float32")}
    computed, reference = results(program, x.float().numpy())
    expected = program.module()(x)
    for y, z, torch_y in zip(computed, reference, expected, strict=True):
        assert y.dtype == z.dtype == (kind if torch_y.dtype is x.dtype else "int64")
        np.testing.assert_allclose(*(a.astype("float32") for a in (y, z)), rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(computed[0].astype("float32"), expected[0].float().detach(), atol=0.05)


@pytest.mark.long
def test_casts_that_round_stay():
    torch.manual_seed(0)
    x, count = torch.randn(4, 300), torch.tensor([2**24 + 1, 10**12 + 7])
    program = torch.export.export(Cases(), (x, count))
    computed, reference = results(program, x.numpy(), count.numpy())
    for y, z, expected in zip(computed, reference, Cases()(x, count), strict=True):
        assert y.dtype == z.dtype == expected.numpy().dtype
        np.testing.assert_allclose(y, expected, rtol=1e-6)
        np.testing.assert_array_equal(z, expected)


@pytest.mark.long
def test_buffers_are_in_fp32_too():
    program = torch.export.export(CountingProgram(), (torch.ones(3, dtype=torch.bfloat16),))
    steps = np.array([0.5, 1, 2], "float32")
    for written, doubled in results(program, np.ones(3, "float32"), steps):
        assert (written.dtype, doubled.dtype) == (np.float32, ml_dtypes.bfloat16)
        np.testing.assert_array_equal(written, 1 + steps)
        np.testing.assert_array_equal(doubled.astype("float32"), 2 + 2 * steps)


def test_bits_of_narrow_types_are_refused():
    with pytest.raises(UnsupportedOpError, match="'view' takes the bits of torch"):
        frontend.load(exported(lambda x: x.half().view(torch.int16), torch.ones(2)))


@pytest.mark.long
def test_a_module_in_bf16_is_called_as_it_is():
    torch.manual_seed(0)
    network, x = torch.nn.Linear(16, 8).eval().bfloat16(), torch.randn(2, 16).bfloat16()
    compiled = pimflow.compile(network, (x,))
    result = compiled(x)
    assert result.dtype is torch.bfloat16
    assert (result.float() - network(x).float()).abs().max() <= 0.03
