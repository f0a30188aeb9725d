"""Is every option heeded or refused, at the API as at the command, whatever it stands beside?"""

import json

import pytest
from command_line import error_line

import pimflow
from pimflow.commands.main import main
from pimflow.errors import InfeasibleError

# There is no such network: options are refused before anything is read.
NOTHING = "no-such-network"


@pytest.fixture(scope="module")
def plan(tmp_path_factory):
    path = tmp_path_factory.mktemp("plans") / "plan.json"
    path.write_text(pimflow.search("toy", pimflow.system(dtype="fp32"), modes="gpu,pim").plan.to_json())
    return path


def test_what_has_an_effect_is_not_refused(plan):
    """Bounds beside a plan, and the GPU alone beside C, which has nothing else."""
    target_system = pimflow.system(dtype="fp32")
    assert pimflow.search("toy", target_system, plan=plan, max_latency_ns=1e9, max_energy_pj=1e12)
    with pytest.raises(pimflow.errors.PimflowError, match=NOTHING):
        pimflow.compile(NOTHING, target="c", modes="gpu")


@pytest.mark.long
@pytest.mark.parametrize(
    ("bound", "what"),
    [
        ({"max_memory_bytes": 1000.0}, "memory"),
        ({"max_latency_ns": 1.0}, "latency"),
        ({"max_energy_pj": 1.0}, "energy"),
    ],
)
def test_a_plan_that_keeps_to_no_bound_is_infeasible(bound, what, plan):
    with pytest.raises(InfeasibleError, match=f"{what} of the plan for 'toy'.*a search instead of the plan"):
        pimflow.search("toy", pimflow.system(dtype="fp32"), plan=plan, **bound)


@pytest.mark.long
def test_a_memory_budget_bounds_a_plan_at_the_command(plan, capsys):
    command = ["compile", "toy", "--target", "cuda+pim", "--dtype", "fp32", "--select", "--device", "cuda"]
    command += ["--plan", str(plan), "--explain", "fc", "--json", "--quiet", "--cache", "none"]
    assert "memory of the plan for 'toy'" in error_line(capsys, 4, *command, "--memory-budget", "1KiB")
    assert main([*command, "--memory-budget", "1GiB"]) == 0
    assert json.loads(capsys.readouterr().out)["region"] == "fc"


@pytest.mark.long
def test_fusion_and_the_choice_of_forms_are_one_search():
    """Each alone finds less than both together; and both at once no less than one after the other."""
    target_system, modes = pimflow.system(), "gpu,pim"
    pays = "tucker:0.25,where=pays"
    joint_search = pimflow.search("toy", target_system, decompose=pays, fuse=True, modes=modes)
    assert joint_search.group_tilings() and any(region.role for region in joint_search.graph.regions)
    for single_options in ({"decompose": pays}, {"fuse": True}, {"decompose": "tucker:0.25", "fuse": True}):
        search_result = pimflow.search("toy", target_system, modes=modes, **single_options)
        assert joint_search.evaluation.latency_ns < search_result.evaluation.latency_ns
