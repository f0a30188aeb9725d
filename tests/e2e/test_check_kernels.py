"""Does ``--check-kernels`` pass right kernels and refuse faulty ones, wherever it is given?"""

import numpy as np
import pytest
import tvm
from kernel_mutations import mutant

import pimflow
from pimflow import frontend
from pimflow.commands.main import main
from pimflow.compiler.kernel_checks import check, kernels
from pimflow.errors import UsageError, VerificationError
from pimflow.tvm_extension import relay


@pytest.fixture
def faulty_kernels(monkeypatch):
    """The first kernel that can be so stores one element further on."""

    def network_kernels(module, system):
        scheduled, rng = kernels.network_kernels(module, system), np.random.default_rng(0)
        return [mutant(scheduled[0], "a store that is one element further on", rng)]

    monkeypatch.setattr(check, "network_kernels", network_kernels)


@pytest.mark.long
def test_right_kernels_are_counted(capsys):
    options = ["--target", "cuda+pim", "--check-kernels", "--conventions", "none"]
    assert main(["compile", "toy", *options]) == 0
    assert "kernels checked thread by thread" in capsys.readouterr().out


@pytest.mark.long
def test_a_faulty_kernel_is_one_line(faulty_kernels, tmp_path, capsys):
    options = ["--target", "cuda+pim", "--check-kernels", "--quiet", "-o", str(tmp_path / "out")]
    assert main(["compile", "toy", *options]) == 5
    (line,) = capsys.readouterr().err.splitlines()
    assert "GPU kernel 'fused_" in line and "[" in line
    assert not (tmp_path / "out").exists()


@pytest.mark.long
def test_relay_takes_it_from_the_pass_context(faulty_kernels):
    with tvm.transform.PassContext(config={"pimflow.check_kernels": True, "pimflow.modes": "gpu"}):
        with pytest.raises(VerificationError, match="GPU kernel"):
            relay.build(frontend.load("toy").module, target="cuda+pim")
        with pytest.raises(UsageError, match="give --target cuda"):
            relay.build(frontend.load("toy").module, target="llvm+pim")


def test_it_needs_cuda_kernels():
    with pytest.raises(UsageError, match="give --target cuda"):
        pimflow.compile("toy", check_kernels=True)
