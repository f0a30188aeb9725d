"""Does ``--fuse-activations`` reach the plan, the kernels, the memory and the errors?"""

import json
from dataclasses import replace

import numpy as np
import pytest
import tvm
from command_line import error_line
from papers.temco_variants import with_fused_runs
from tvm import relax

import pimflow
from pimflow import frontend
from pimflow.commands.main import main
from pimflow.compiler import phases
from pimflow.core.plan import Choice
from pimflow.core.rewrite import OPERATOR_KERNELS, FusedGroupRewrite
from pimflow.decomposition.network import decompose
from pimflow.decomposition.request import DecompositionRequest
from pimflow.hardware import system
from pimflow.placement.candidates import fused_groups
from pimflow.placement.candidates.candidates import CandidateGenerator

OPTIONS = {"decompose": "tucker:0.5", "fuse_activations": True}
RUN = ("widen.conv.lconv", "down.conv.fconv")


@pytest.fixture(scope="module")
def searched():
    """A plan with PIM, and the run, faster or not, on the GPU; every reader can read every tensor."""
    plan = pimflow.search("toy", **OPTIONS).plan
    choices = [choice for choice in plan.with_gpu_channels().choices if choice.region != RUN[1]]
    position = next(index for index, choice in enumerate(choices) if choice.region == RUN[0])
    choices[position] = Choice(regions=RUN, rewrite=FusedGroupRewrite())
    return pimflow.search("toy", plan=replace(plan, choices=tuple(choices)), **OPTIONS)


@pytest.mark.long
def test_a_run_is_one_kernel_of_the_plan_and_of_what_is_built(searched):
    """Outputs and every PIM region are verified by `compile` itself."""
    assert searched.graph.runs == (RUN,)
    assert searched.candidate_by_region[RUN[0]] is searched.candidate_by_region[RUN[1]]
    compiled = pimflow.compile("toy", plan=searched.plan, **OPTIONS, conventions="none")
    assert compiled.verification.is_verified
    (row,) = (r for r in compiled.report.regions if r.name == RUN[1])
    assert row.covers == RUN and row.mode == "GPU"
    assert row.latency_ns == 0.0, "its time is that of the run, at the first region"


@pytest.mark.long
def test_the_plan_file_keeps_runs(searched, tmp_path):
    path = tmp_path / "plan.json"
    path.write_text(searched.plan.to_json())
    replanned = pimflow.search("toy", plan=path, **OPTIONS)
    assert replanned.evaluation == searched.evaluation
    assert replanned.plan.choices == searched.plan.choices


def test_a_run_moves_what_is_outside_of_it(searched):
    generator = CandidateGenerator(searched.graph, searched.system)
    first, last = (searched.graph.region(name) for name in RUN)
    tiling = searched.group_tilings()[RUN]
    kernel = generator.tilings.kernel(RUN, tiling)
    assert kernel.input_bytes == 2 * np.prod(first.input_shapes[0])
    assert kernel.output_bytes == 2 * np.prod(last.output_shape)
    assert kernel.macs == first.geometry.macs + last.geometry.macs
    weights = 2 * (first.kernel.weight_elements + last.kernel.weight_elements)
    assert kernel.again_bytes == weights * (kernel.blocks - 1), "each of its tiles, which have no halo"
    separate_bytes = sum(generator.make(r, OPERATOR_KERNELS).tasks[0].moved_bytes for r in (first, last))
    assert (
        fused_groups.make(generator, RUN, None, FusedGroupRewrite(tiling=str(tiling))).tasks[0].moved_bytes
        < separate_bytes
    )


@pytest.mark.long
def test_without_pim_runs_are_fused_too():
    """The network that a plan is compared with fuses as the plan does."""
    gpu_only = system(pim_channels=0)
    fused = pimflow.search("toy", gpu_only, **OPTIONS)
    unfused = pimflow.search("toy", gpu_only, decompose="tucker:0.5")
    assert tuple(fused.group_tilings()) == (RUN,)
    assert fused.evaluation.latency_ns == fused.gpu_only.latency_ns < unfused.gpu_only.latency_ns


@pytest.mark.long
def test_same_values_and_less_memory(capsys):
    network = decompose(frontend.load("toy"), DecompositionRequest.parse("tucker:0.5")).network
    plans, results = [], []
    for variant in (network, with_fused_runs(network)):
        vm = relax.VirtualMachine(phases.build(variant.module, "llvm+pim", system(), plans.append), tvm.cpu())
        arguments = [tvm.runtime.tensor(value) for value in network.example_inputs().values()]
        vm_result = vm["main"](*arguments)
        results.append((vm_result if hasattr(vm_result, "numpy") else vm_result[0]).numpy())
    (expected,) = network.reference(network.example_inputs())
    for result in results:
        assert np.abs(result - expected).max() <= 1e-4 * np.abs(expected).max()
    command = ["memory", "toy", "--json", "--quiet", "--decompose", "tucker:0.5"]
    assert main(command) == 0
    unfused = json.loads(capsys.readouterr().out)
    assert main([*command, "--fuse-activations"]) == 0
    fused = json.loads(capsys.readouterr().out)
    assert fused["eager_bytes"] < unfused["eager_bytes"] and unfused["fused"] == []
    assert fused["pool_bytes"] == plans[1].pool_bytes <= plans[0].pool_bytes
    assert [run[0] for run in fused["fused"]] == [RUN[0]]


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (["memory", "toy", "--fuse-activations"], "give --decompose too"),
        (["compile", "toy", "--fuse-activations"], "give --decompose too"),
        (["memory", "buffers.csv", "--fuse-activations"], "a table of buffers, not a network"),
    ],
)
def test_what_cannot_be_fused_is_said(argv, said, capsys):
    assert said in error_line(capsys, 2, *argv, "--quiet")


def test_no_chain_to_fuse(tmp_path, capsys):
    ranks = tmp_path / "ranks.toml"
    ranks.write_text('"down.conv" = [1, 1]\n')
    options = ["--decompose", f"tucker:{ranks}", "--fuse-activations", "--quiet"]
    assert "no activation to fuse" in error_line(capsys, 2, "memory toy", *options)
