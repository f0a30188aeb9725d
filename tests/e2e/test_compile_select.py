"""Are networks with chosen primitives right, in one pool, and kept from CPUs that they were not made for?"""

import numpy as np
import pytest

import pimflow
from pimflow.commands.run import run
from pimflow.commands.shared import report_text
from pimflow.errors import ArtifactError
from pimflow.primitives import PRIMITIVES


@pytest.fixture(scope="module")
def compiled(tmp_path_factory):
    folder = tmp_path_factory.mktemp("selected") / "toy"
    compilation = pimflow.compile("toy", folder, select={"measure": 1}, modes="gpu", conventions="none")
    return compilation, folder


@pytest.mark.long
def test_the_report_says_what_was_chosen(compiled):
    compilation, _ = compiled
    selection = compilation.report.extras.primitives
    assert compilation.verification.is_verified and selection.status == "optimal"
    layers = {choice.layer: choice.primitive for choice in selection.choices}
    regions = {r.name for r in compilation.search_result.graph.regions if r.geometry is not None}
    assert set(layers) == regions and set(layers.values()) <= set(PRIMITIVES)


def test_inferences_are_timed_beside_their_kernels(compiled):
    compilation, _ = compiled
    row = compilation.report.extras.primitives.network_time
    assert row.measured_ns > 0 and row.kernels
    assert row.difference == pytest.approx(row.time_ns / row.measured_ns - 1)
    assert "kernels alone" in report_text.table(compilation.report, None)


@pytest.mark.long
def test_the_same_as_without(compiled):
    compilation, folder = compiled
    plain = pimflow.compile("toy", modes="gpu", conventions="none")
    assert plain.report.extras.primitives is None
    assert compilation.verification.max_relative_error <= 1e-4
    assert [y.shape for y in pimflow.run(folder)] == [(1, 10)]
    assert np.isfinite(pimflow.run(folder)[0]).all()


def test_another_cpu_is_refused(compiled, monkeypatch):
    _, folder = compiled
    monkeypatch.setattr(run, "cpu_name", lambda: "another")
    with pytest.raises(ArtifactError, match="and this is 'another'"):
        pimflow.run(folder)


@pytest.mark.long
def test_layers_on_pim_stay_there(tmp_path):
    compilation = pimflow.compile("toy", select={"measure": 1}, conventions="none")
    assert compilation.verification.is_verified and compilation.verification.regions
    assert compilation.report.extras.primitives.network_time is None
    assert "network_time" not in compilation.report.to_json()["primitives"]
