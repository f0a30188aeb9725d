"""Caches in PyTorch programs as transformers and others write them, against PyTorch on the program."""

import numpy as np
import pytest
import tvm
from graphs import PLAIN_CODE
from tvm import relax

pytest.importorskip("torch")

import torch

from pimflow import frontend
from pimflow.compiler import phases

pytestmark = pytest.mark.torch

PLACES, HEADS, SIZE = 8, 2, 4


class Step(torch.nn.Module):
    """One token's attention over a cache that it writes to by `write`."""

    def __init__(self, form: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.form, width = form, HEADS * SIZE
        self.query, self.key, self.value = (torch.nn.Linear(width, width) for _ in range(3))
        for name in ("keys", "values"):
            self.register_buffer(name, torch.zeros(1, HEADS, PLACES, SIZE))

    def write(self, cache, new, place):
        """The cache with the token."""
        if self.form == "index_copy":
            return cache.index_copy(2, place, new)
        if self.form == "index_put":
            cache = cache.clone()
            cache[:, :, place] = new
            return cache
        if self.form == "where":
            return torch.where((torch.arange(PLACES) == place).view(1, 1, PLACES, 1), new, cache)
        if self.form == "buffers":
            cache.index_copy_(2, place, new)
            return cache
        return torch.cat([torch.cat([torch.tensor([]), cache], -2), new], 2)

    def forward(self, x, place, past):
        """The result, and the caches unless they are buffers."""
        split = (f(x).view(1, 1, HEADS, SIZE).transpose(1, 2) for f in (self.query, self.key, self.value))
        past = (self.keys, self.values) if self.form == "buffers" else past
        query, key, value = split
        key, value = self.write(past[0], key, place), self.write(past[1], value, place)
        scores = query @ key.transpose(2, 3) / SIZE**0.5
        if self.form != "empty":
            scores = scores + torch.where(torch.arange(PLACES) <= place, 0.0, float("-inf"))
        y = (torch.softmax(scores, -1) @ value).transpose(1, 2).reshape(1, 1, HEADS * SIZE)
        return (y,) if self.form == "buffers" else (y, key, value)


@pytest.mark.long
@pytest.mark.parametrize("form", ["index_copy", "index_put", "where", "buffers", "empty"])
def test_steps_write_and_read_their_caches(form):
    """Also if the caches are one nested argument, or inputs are called as ours are."""
    length = PLACES - (form == "empty")
    empty = [torch.zeros(1, HEADS, length, SIZE) for _ in range(2)]
    step = Step(form).eval()
    arguments = (torch.randn(1, 1, HEADS * SIZE), torch.tensor([3]), empty)
    program = torch.export.export(step, arguments, strict=False)
    network = frontend.load(program, context=PLACES)
    assert len(network.states) == 2
    machine = relax.VirtualMachine(phases.build(network.module, PLAIN_CODE), tvm.cpu())
    rng = np.random.default_rng(0)
    for place in (0, 3, PLACES - 1):
        inputs = {name: rng.normal(size=dims).astype(kind) for name, (dims, kind) in network.inputs.items()}
        inputs["place"] = np.array([place])
        if network.position:
            inputs[network.position] = np.array([length])
        expected = network.reference(inputs)
        results = machine["main"](*(tvm.runtime.tensor(value) for value in inputs.values()))
        assert len(results) == len(expected) == 3
        for result, value in zip(results, expected):
            np.testing.assert_allclose(result.numpy(), value, rtol=1e-5, atol=1e-6)
