"""Do programs of PyTorch with complex numbers compute, in real ones, what PyTorch does?"""

import numpy as np
import pytest
from graphs import exported, outputs
from length import long_but

from pimflow import frontend
from pimflow.errors import UnsupportedOpError

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.torch
fft = torch.fft


def mode_placement(x):
    """A Fourier layer: a product of some modes, which are written into zeros."""
    modes = fft.rfft2(x, norm="forward")
    result = torch.zeros_like(modes)
    result[:, :2, :3] = torch.einsum("bij,bkj->bik", modes[:, :2, :3], modes[:, :3, :3].conj())
    return fft.irfft2(result, s=x.shape[-2:], norm="forward")


def rotate(x):
    angles = torch.arange(12.0).reshape(4, 3)
    pairs = torch.view_as_complex(x[..., :6].contiguous().reshape(2, 4, 3, 2))
    return torch.view_as_real(pairs * torch.polar(torch.ones_like(angles), angles)).flatten(2)


def ratio(x):
    z = torch.complex(x[0], x[1])
    return (torch.exp(1j * z / 3) / (2 + z)).angle() + torch.reciprocal(z - 3).real + (z**2 - z).imag


FUNCTIONS = {
    "sizes": lambda x: fft.rfft(x, norm="ortho").abs(),
    "both ways": lambda x: fft.ifft2(fft.fft2(x) * 2).real + fft.ifft(x, dim=1).imag,
    "along the first axis": lambda x: fft.irfft(fft.rfft(x, dim=1), n=4, dim=1) + fft.hfft(x, n=7),
    "modes": mode_placement,
    "rotations": rotate,
    "ratios": ratio,
    "stft": lambda x: torch.stft(x.flatten(1), 8, 4, window=torch.hann_window(8), return_complex=True).abs(),
}


class ComplexFunctions(torch.nn.Module):
    def __init__(self, names):
        super().__init__()
        self.names, self.weight = names, torch.nn.Parameter(torch.randn(4, dtype=torch.complex64))
        self.register_buffer("shift", torch.randn(4, dtype=torch.complex128))

    def forward(self, x):
        filtered = fft.irfft(fft.rfft(x) * self.weight + self.shift.to(torch.complex64), n=7)
        return filtered, *(FUNCTIONS[name](x) for name in self.names)


@pytest.mark.parametrize("names", long_but(["weights"], {"weights": [], "all": list(FUNCTIONS)}))
def test_results_are_those_of_pytorch(names):
    torch.manual_seed(0)
    x, network = torch.randn(2, 4, 7), ComplexFunctions(names)
    loaded = frontend.load(torch.export.export(network, (x,)))
    results = outputs(loaded.module, [x.numpy()])
    for name, result, expected in zip(["weights", *names], results, network(x), strict=True):
        np.testing.assert_allclose(result, expected.detach(), rtol=1e-4, atol=1e-5, err_msg=name)


@pytest.mark.parametrize(
    ("function", "kind", "message"),
    [
        (torch.real, "complex64", "input 'x' is complex; take its parts as inputs"),
        (fft.rfft, "float32", "returns complex numbers; return torch.view_as_real of them"),
        (lambda x: fft.rfft(x).tan().real, "float32", "'tan' .* of complex numbers is not supported"),
    ],
)
def test_complex_inputs_and_results_are_refused(function, kind, message):
    program = exported(function, torch.ones(4, dtype=getattr(torch, kind)))
    with pytest.raises(UnsupportedOpError, match=message):
        frontend.load(program)
