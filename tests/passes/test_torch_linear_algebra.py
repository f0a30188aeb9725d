"""Is linear algebra of small matrices in PyTorch's programs what PyTorch computes?"""

import numpy as np
import pytest
from graphs import exported, outputs
from length import long_but

from pimflow import frontend
from pimflow.errors import UnsupportedOpError

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.torch
linalg = torch.linalg

# Rows have to change places in all but the first; the last one is singular.
MATRICES = torch.tensor(
    [
        [[4.0, 1, 0.5], [1, 3, -1], [0.5, -1, 2]],
        [[0, 1, 0], [0, 0, 1], [2, 0, 0]],
        [[1e-6, 1, 2], [1, 1, 5], [-7, 1, 3]],
    ]
)
SINGULAR = torch.tensor([[1.0, 2, 3], [2, 4, 6], [1, 0, 1]])
FUNCTIONS = {
    "determinants": lambda x: linalg.det(x),
    "of a singular matrix": lambda x: linalg.det(x[0] * 0 + SINGULAR),
    "logarithms": lambda x: linalg.slogdet(x),
    "inverses": lambda x: linalg.inv(x),
    "solutions": lambda x: linalg.solve(x, x[:1].mT),
    "solutions of vectors": lambda x: linalg.solve(x[1], x[0, 0]),
    "solutions from the right": lambda x: linalg.solve(x, x[:, :2], left=False),
    "Cholesky": lambda x: linalg.cholesky(x[0]),
    "by Cholesky": lambda x: torch.cholesky_solve(x[0], linalg.cholesky(x[0], upper=True), upper=True),
    "triangles": lambda x: linalg.solve_triangular(x[0].tril(), x[1], upper=False),
    "upper ones": lambda x: linalg.solve_triangular(x[0], x[1], upper=True, left=False, unitriangular=True),
    "exponentials": lambda x: linalg.matrix_exp(x),
    "powers": lambda x: linalg.matrix_power(x, -2),
}


@pytest.mark.parametrize("names", long_but(["first"], {"first": ["determinants"], "all": list(FUNCTIONS)}))
def test_results_are_those_of_pytorch(names):
    def network(x):
        results = [FUNCTIONS[name](x) for name in names]
        return [part for result in results for part in (result if isinstance(result, tuple) else [result])]

    loaded = frontend.load(exported(network, MATRICES))
    results = outputs(loaded.module, [MATRICES.numpy()])
    for result, expected in zip(results, network(MATRICES.double()), strict=True):
        scale = expected.abs().amax().item() or 1
        np.testing.assert_allclose(result, expected, rtol=0, atol=1e-5 * scale)


def test_large_matrices_are_refused():
    program = exported(linalg.inv, torch.eye(20))
    with pytest.raises(UnsupportedOpError, match="of matrices of 20 x 20 is not supported: up to 16 rows"):
        frontend.load(program)
