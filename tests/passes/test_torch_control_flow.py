"""Is control flow of PyTorch's programs inlined or unrolled, with the values that PyTorch computes?"""

import numpy as np
import pytest
from graphs import exported, outputs

from pimflow import frontend
from pimflow.errors import UnsupportedOpError

torch = pytest.importorskip("torch")
pytestmark = [pytest.mark.torch, pytest.mark.long]


def branches(x):
    return torch.cond(
        x.sum() > 0,
        lambda x, y: (x.sin(), torch.cond(y[0] > 3, torch.cos, torch.exp, (y,))),
        lambda x, y: (y * 2, x + y),
        (x, x + 1),
    )


def trips(x, limit):
    from torch._higher_order_ops.while_loop import while_loop

    return while_loop(lambda i, x: i < limit(x), lambda i, x: (i + 1, x * 1.5), (torch.tensor(0), x))


def rows(x):
    from torch._higher_order_ops.map import map as each
    from torch._higher_order_ops.scan import scan

    total, products = scan(lambda total, row: (total + row, total * row), torch.zeros(4), x.reshape(3, 4))
    return total, products, each(lambda row: row.softmax(-1), x.reshape(3, 4))


@pytest.mark.parametrize(
    "function", [branches, lambda x: trips(x, lambda x: 5), rows], ids=["if", "while", "rows"]
)
def test_what_runs_is_inlined(function):
    x = torch.linspace(-1, 2, 12)
    program = exported(function, x)
    loaded = frontend.load(program)
    for sign in (1, -1):
        results = outputs(loaded.module, [sign * x.numpy()])
        for result, expected in zip(results, program.module()(sign * x), strict=True):
            np.testing.assert_allclose(result, expected, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(
    ("limit", "message"),
    [(lambda x: x[0], "ends when computed values say so"), (lambda x: 999, "more than 256 trips")],
)
def test_loops_that_cannot_be_unrolled_are_refused(limit, message):
    program = exported(lambda x: trips(x, limit), torch.ones(3))
    with pytest.raises(UnsupportedOpError, match=message):
        frontend.load(program)
