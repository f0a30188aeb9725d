"""Are networks with chosen primitives right, in one pool, and kept from CPUs that they were not made for?"""

import numpy as np
import pytest

import pimflow
from pimflow.api import report_text, run
from pimflow.errors import ArtifactError
from pimflow.primitives import PRIMITIVES


@pytest.fixture(scope="module")
def compiled(tmp_path_factory):
    folder = tmp_path_factory.mktemp("selected") / "toy"
    made = pimflow.compile("toy", folder, select={"measure": 1}, modes="gpu", conventions="none")
    return made, folder


def test_the_report_says_what_was_chosen(compiled):
    made, _ = compiled
    chosen = made.report.primitives
    assert made.verification.is_verified and chosen.status == "optimal"
    layers = {choice.layer: choice.primitive for choice in chosen.choices}
    regions = {r.name for r in made.search_result.graph.regions if r.geometry is not None}
    assert set(layers) == regions and set(layers.values()) <= set(PRIMITIVES)


def test_inferences_are_timed_beside_their_kernels(compiled):
    made, _ = compiled
    row = made.report.primitives.network_time
    assert row.measured_ns > 0 and row.kernels
    assert row.difference == pytest.approx(row.time_ns / row.measured_ns - 1)
    assert "kernels alone" in report_text.table(made.report, None)


def test_the_same_as_without(compiled):
    made, folder = compiled
    plain = pimflow.compile("toy", modes="gpu", conventions="none")
    assert plain.report.primitives is None
    assert made.verification.max_relative_error <= 1e-4
    assert [y.shape for y in pimflow.run(folder)] == [(1, 10)]
    assert np.isfinite(pimflow.run(folder)[0]).all()


def test_another_cpu_is_refused(compiled, monkeypatch):
    _, folder = compiled
    monkeypatch.setattr(run, "cpu_name", lambda: "another")
    with pytest.raises(ArtifactError, match="and this is 'another'"):
        pimflow.run(folder)


@pytest.mark.long
def test_layers_on_pim_stay_there(tmp_path):
    made = pimflow.compile("toy", select={"measure": 1}, conventions="none")
    assert made.verification.is_verified and made.verification.regions
    assert made.report.primitives.network_time is None
    assert "network_time" not in made.report.to_json()["primitives"]
