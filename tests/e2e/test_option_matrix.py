"""Does each option of `compile` change what comes out, whatever other option stands beside it?

Or is it refused, with exit code 2 and a sentence. What comes out is the report, what is printed, and what the
last steps are told: the network and the plan that are built, for which targets, with which primitives; how
outputs are judged; what is written. Code is neither generated nor run here, and nothing is done twice from
the same inputs.
"""

import copy
import datetime
import itertools
import json
import os
import random
from dataclasses import dataclass, replace
from types import SimpleNamespace

import numpy as np
import onnx
import pytest
import tvm_ffi
from decoders import DecoderModel

from pimflow import memory, zoo
from pimflow.commands import parser
from pimflow.commands.compile import compile_steps, reference_run
from pimflow.commands.compile.compile_steps import BuildSet
from pimflow.commands.compile.conventions import ConventionGain, ConventionSearch
from pimflow.commands.main import main
from pimflow.commands.shared import prepare
from pimflow.compiler import artifact
from pimflow.compiler.packed_states import PackedStates
from pimflow.compiler.smaller_pool import PoolPlanning
from pimflow.compiler.verification import Verification
from pimflow.core.output_error import OutputCheck
from pimflow.core.plan import Choice
from pimflow.decomposition import choice, skips
from pimflow.frontend.reference import Reference
from pimflow.hardware.reader import SPECS
from pimflow.pim_backend.runtime.cuda_binary import CudaKernels

CHAINS = {"--decompose": "tucker:0.25"}
FRONT = {"--pareto": "2"}
CACHES = {"model": "DECODER"}  # not an option: what is compiled, and `toy` where nothing says it
SWAPPED = {"model": "SWAPPED", "--context": "8"}
ON_GPU = {"--select": "", "--device": "cuda", "--target": "cuda+pim", "--dtype": "fp32"}
FOR_CPU = {"--select": ""}


@dataclass(frozen=True)
class OptionCase:
    """Values of an option, and what else it needs: values that stand beside it, where it is judged.

    Further values are tried where the first is what holds anyway.
    """

    values: tuple[str, ...] = ("",)
    needs: tuple[tuple[str, str], ...] = ()


def option(*values):
    return OptionCase(values or ("",))


def option_with(needs, *values):
    return OptionCase(values or ("",), tuple(needs.items()))


OPTIONS = {
    "--shape": option("input=1,3,24,24"),
    "--batch": option("2"),
    "--context": option_with(CACHES, "8"),
    "--state": option_with(SWAPPED, "keys=keys_after"),
    "--target": option("cuda+pim"),
    "--target c": option("c"),
    "--system": option("SYSTEM"),
    "--gpu": option("a100"),
    "--pim": option("aim-gddr6"),
    "--pim-channels": option("8"),
    "--timing": option("ramulator-pimflow", "strict"),
    "--scheduling": option("newton+"),
    "--dtype": option("fp32"),
    "--copies": option("made"),
    "--padding": option("symmetric"),
    "--splits": option("grid"),
    "--channel-sharing": option("partitioned"),
    "--launches": option("ahead"),
    "--accounting": option("paper"),
    "--weights": option("streamed"),
    "--copy-ahead": option_with({"--weights": "streamed"}, "2"),
    "--conventions": option("none"),
    "--objective": option("energy"),
    "--modes": option("gpu,pim"),
    "--pin": option("down.conv=gpu"),
    "--max-latency": option("1s"),
    "--max-energy": option("1J"),
    "--memory-budget": option("1GiB"),
    "--max-error": option_with(CHAINS, "1e9"),
    "--profiler": option("pim=ramulator:SIMULATOR"),
    "--plan": option("PLAN"),
    "--fuse": option(),
    "--reorder": option(),
    "--decompose": option("tucker:0.25"),
    "--optimize-skips": option_with(CHAINS),
    "--skip-criterion": option_with(CHAINS | {"--optimize-skips": ""}, "paper"),
    "--fuse-activations": option_with(CHAINS),
    "--calibration": option_with(CHAINS, "SAMPLES"),
    "--pareto": option("2"),
    "--plot": option_with(FRONT, "PICTURE"),
    "--select": option("predicted"),
    "--select on a GPU": option_with({k: v for k, v in ON_GPU.items() if k != "--select"}),
    "--minimize": option_with(FOR_CPU, "memory"),
    "--time-budget": option_with(FOR_CPU, "1s"),
    "--memory-model": option_with(FOR_CPU, "sum"),
    "--device": option_with(FOR_CPU | {"--target": "c"}, "rpc:host:9190"),
    "--measure": option_with(FOR_CPU, "3"),
    "--explain": option("down.conv"),
    "--output": option("DIRECTORY"),
    "--emit-traces": option_with({"--output": "DIRECTORY"}),
    "--tolerance": option("0.01"),
}
# A stand-in for the Ramulator fork: what it counts, and a clock of 3 cycles a line.
SIMULATOR = """#!/bin/sh
for name in GWRITE G_ACT COMP READRES PREA PRE REF; do echo "$name $(grep -c $name "$5")"; done
echo "Cycle $(( $(wc -l < "$5") * 3 + 1 ))"
"""
# By option and the one beside it, why the first rightly has no effect.
IDLE = {
    (
        "--fuse-activations",
        "--fuse",
    ): "a run that is faster is a group already; others save memory alone, and "
    "where that counts nobody has to ask for them",
    ("--fuse", "--context"): "the decoder has no layers that a group joins",
    ("--fuse", "--state"): "the decoder has no layers that a group joins",
    ("--weights", "--explain"): "copies are charged to the network, not to a layer's candidates",
    ("--copy-ahead", "--explain"): "copies are charged to the network, not to a layer's candidates",
    ("--reorder", "--explain"): "no order is better here, and what says so is no candidate",
}
# How the work is done, or is told of, not what comes out; and inputs, by which it is judged.
OTHERS = {"--inputs", "--input", "--value", "--solver", "--search-seconds", "--force", "--jobs"}
OTHERS |= {"--executor", "--cache", "--quiet", "--verbose", "--show-config", "--json", "--layers"}
OTHERS |= {"--dump-ir", "--check-kernels", "--cuda-graphs", "--help"}
# Of language models of the zoo alone: tests/language/test_narrow_weights.py and test_narrow_caches.py.
OTHERS |= {"--weight-type", "--kv-cache-dtype"}
PAIRS = list(itertools.combinations(OPTIONS, 2))
# Each day other pairs are judged, all of them on request.
SEED = int(os.environ.get("PIMFLOW_PAIRS_SEED", datetime.date.today().toordinal()))
DRAWN = PAIRS if "PIMFLOW_ALL_PAIRS" in os.environ else random.Random(SEED).sample(PAIRS, 20)
# Those that have been forgotten before.
QUICK = [
    ("--memory-budget", "--plan"),
    ("--fuse", "--target c"),
    ("--objective", "--target c"),
    ("--max-latency", "--plan"),
    ("--memory-budget", "--select"),
    ("--target c", "--memory-budget"),
    ("--max-error", "--plan"),
    ("--explain", "--pareto"),
    ("--explain", "--conventions"),
    ("--conventions", "--output"),
    ("--context", "--state"),
    ("--context", "--objective"),
]


def flag(name):
    """The option that a row of `OPTIONS` is of."""
    return name.split()[0]


def test_every_option_is_in_the_table():
    flags = {flag for flag in parser.parse(["compile", "toy"]).parser.flags if flag.startswith("--")}
    assert flags == {flag(name) for name in OPTIONS} | OTHERS


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """Values that are files: networks, samples, a system, and places to write to."""
    folder = tmp_path_factory.mktemp("values")
    proto = zoo.load_model("toy")
    opened = onnx.ModelProto()
    opened.CopyFrom(proto)
    for dim in opened.graph.input[0].type.tensor_type.shape.dim[2:]:
        dim.dim_param = "size"
    for value in (*opened.graph.output, *opened.graph.value_info):
        value.type.tensor_type.ClearField("shape")
    onnx.save(opened, folder / "open.onnx")
    name = proto.graph.input[0].name
    shape = [dim.dim_value for dim in proto.graph.input[0].type.tensor_type.shape.dim]
    np.savez(folder / "samples.npz", **{name: np.ones((2, *shape[1:]), np.float32)})
    onnx.save(DecoderModel(kv_heads=2).model(), folder / "decoder.onnx")
    onnx.save(_swap_caches(DecoderModel(kv_heads=2).model()), folder / "swapped.onnx")
    preset = SPECS / "system" / "pimflow.toml"
    (folder / "system.toml").write_text(preset.read_text().replace("value = 16", "value = 12"))
    (folder / "simulator").write_text(SIMULATOR)
    (folder / "simulator").chmod(0o755)
    return {
        "pim=ramulator:SIMULATOR": f"pim=ramulator:{folder / 'simulator'}",
        "OPEN": str(folder / "open.onnx"),
        "DECODER": str(folder / "decoder.onnx"),
        "SWAPPED": str(folder / "swapped.onnx"),
        "SAMPLES": str(folder / "samples.npz"),
        "SYSTEM": str(folder / "system.toml"),
        "PICTURE": str(folder / "front.svg"),
        "DIRECTORY": str(folder / "out"),
        "PLAN": str(folder / "plan.json"),
    }


def _swap_caches(model):
    """`model` with other names of its caches, which come out in another order than they go in."""
    names = {"past_key_values.0.key": "keys", "present.0.key": "keys_after"}
    names |= {"past_key_values.0.value": "values", "present.0.value": "values_after"}
    for node in model.graph.node:
        for tensor_names in (node.input, node.output):
            tensor_names[:] = [names.get(name, name) for name in tensor_names]
    for value in (*model.graph.input, *model.graph.output):
        value.name = names.get(value.name, value.name)
    logits, keys, values = map(copy.deepcopy, model.graph.output)
    del model.graph.output[:]
    model.graph.output.extend([logits, values, keys])
    return model


def model_of(options, files):
    """What is compiled."""
    return files[options.get("model", "OPEN")] if {"model", "--shape"} & options.keys() else "toy"


def memoize(function, key):
    """`function`, which computes what has the same `key` once."""

    def wrapper(*args, **keywords):
        cache_key = (function.__qualname__, key(*args, **keywords))
        if cache_key not in _MEMO:
            # so that no other object gets their identity
            _MEMO[cache_key] = function(*args, **keywords), args
        return _MEMO[cache_key][0]

    return wrapper


def bytes_of(arrays):
    return tuple(array.tobytes() for array in arrays.values())


def system_key(system):
    """What kernels and pools depend on."""
    return system.uses_views, system.dtype, system.padding


# What takes long and depends on its arguments alone.
MEMOIZED_FUNCTIONS = [
    (
        prepare,
        "load",
        lambda model, options: (
            *(str(model), str(options.shapes), options.batch),
            *(options.context, str(options.states)),
        ),
    ),
    (prepare, "decompose", lambda network, request, *_: (id(network), request.text)),
    (Reference, "__call__", lambda self, values: (id(self), bytes_of(values))),
    (
        choice,
        "layer_errors",
        lambda changes, samples, _: (
            *(id(network_change.network) for network_change in changes),
            samples and bytes_of(samples.inputs),
        ),
    ),
    (
        skips,
        "find",
        lambda network, system, *criterion, fuse_activations: (
            tvm_ffi.structural_hash(network.module),
            network.name,
            system_key(system),
            fuse_activations,
            str(criterion),
        ),
    ),
    (reference_run, "agreement", lambda samples, change: (bytes_of(samples.inputs), id(change.network))),
    (
        PoolPlanning,
        "pool_bytes",
        lambda self, module, target, s: (tvm_ffi.structural_hash(module), str(target), system_key(s), self),
    ),
]
_MEMO = {}


@pytest.fixture
def observations(monkeypatch):
    """What the last steps are told; they do nothing."""
    records = {}

    def record_build(job, network, searched, selection, reference):
        targets = list(dict.fromkeys([job.target, "llvm+pim"]))
        records["searched"] = searched
        records["built"] = [targets, job.in_c, hash(network.module.script())]
        records["built"] += [searched.plan.to_json(), selection and selection.choices]
        fake = dict(memory=memory.plan(()), copies=(), kernels=CudaKernels(), calls=(), states=PackedStates())
        builds = tuple(
            SimpleNamespace(target=name, weight_bytes=0, can_run_here=name == "llvm+pim", **fake)
            for name in targets
        )
        return BuildSet(builds=builds, c_part=None)

    def skip_verification(job, *_):
        check = OutputCheck(relative_error=0.0, bound=job.tolerance or 1e-3)
        return Verification(regions=(), outputs=(check,), violations_by_rule={})

    def record_write(out, files, **_):
        records["written"] = [out, sorted(files.traced_regions), sorted(files.front)]

    def skip_selection(_, options, cache=None):
        return SimpleNamespace(choices=repr(options), layouts={})

    for owner, name, key in MEMOIZED_FUNCTIONS:
        monkeypatch.setattr(owner, name, memoize(getattr(owner, name), key))
    monkeypatch.setattr(compile_steps, "build_targets", record_build)
    monkeypatch.setattr(compile_steps, "verify_builds", skip_verification)
    gain = ConventionGain(same_plan=1.0, searched_again=1.0, gap=0.0, terms=())
    monkeypatch.setattr(ConventionSearch, "gain", lambda *_: gain)
    monkeypatch.setattr(artifact, "write", record_write)
    monkeypatch.setattr(compile_steps.primitive_selection, "select_for", skip_selection)
    monkeypatch.setattr(compile_steps.primitive_selection, "summary", lambda _: None)
    return records


_KNOWN = {}


def outcome(options, files, observations, capsys):
    """Exit code, and what comes out: a text."""
    key = tuple(sorted(options.items()))
    if key in _KNOWN:
        return _KNOWN[key]
    if "--plan" in options:
        _write_plan(options, files, observations, capsys)
    argv = ["compile", model_of(options, files), "--json", "--jobs", "1"]
    for name, value in options.items():
        if name == "model":
            continue
        argv += [name, files.get(value, value)] if value else [name]
    observations.clear()
    picture = files["PICTURE"]
    code = main(argv)
    out, err = capsys.readouterr()
    if code:
        _KNOWN[key] = code, err.splitlines()[-1]
        return _KNOWN[key]
    row = json.loads(out)
    for seconds in ("search_seconds", "wall_seconds"):
        row.pop(seconds, None)
    observations.pop("searched", None)
    notes = [line for line in err.splitlines() if "no .pim trace" in line]
    _KNOWN[key] = 0, json.dumps([row, observations, notes, "--plot" in options and picture], default=str)
    return _KNOWN[key]


def _write_plan(options, files, observations, capsys):
    """A plan for what the other options make of the network, which no search finds: a layer less on PIM."""
    others = {name: value for name, value in options.items() if name not in ("--plan", "--explain", "model")}
    observations.clear()
    model = model_of(options, files)
    # Options that do not go with a plan do not matter here.
    argv = [item for n, v in others.items() for item in ([n, files.get(v, v)] if v else [n])]
    code = main(["compile", model, "--quiet", "--jobs", "1", *argv])
    capsys.readouterr()
    if code:
        return
    search_result = observations["searched"]
    choices = tuple(Choice(regions=(region.name,)) for region in search_result.graph.regions)
    plan = replace(search_result.plan, choices=choices)
    with open(files["PLAN"], "w") as file:
        file.write(plan.to_json())


def merge_options(*parts):
    """Options with their needs; None if two want different values."""
    options = {}
    for part in parts:
        for name, value in part.items():
            if options.setdefault(name, value) != value:
                return None
    return options


def needs(name):
    return dict(OPTIONS[name].needs)


def judge(first, second, files, observations, capsys):
    """Assert that each of two options has an effect beside the other, or that both are refused."""
    for name, partner in ((first, second), (second, first)):
        if (name, partner) in IDLE:
            continue
        values = itertools.product(OPTIONS[partner].values, OPTIONS[name].values)
        has_effect = any(
            effect(
                {flag(name): value},
                {flag(partner): partner_value},
                needs(name),
                needs(partner),
                files,
                observations,
                capsys,
            )
            for partner_value, value in values
        )
        assert has_effect, f"{name} has no effect beside {partner} (PIMFLOW_PAIRS_SEED={SEED})"


def effect(tested, partner, tested_needs, partner_needs, files, observations, capsys):
    """Whether an option changes what comes out beside another, or both are refused."""
    combined = merge_options(tested_needs, partner_needs, tested, partner)
    without = merge_options(tested_needs, partner_needs, partner)
    if combined is None or combined == without:
        return True
    code, result = outcome(combined, files, observations, capsys)
    if code in (2, 3):
        # 3: the samples of --calibration do not have the shape of --shape, no decoder has such shapes, and
        # the simulator times another device.
        other_shape = "--calibration" in combined and {"--shape", "model"} & combined.keys()
        unfit = any(pair <= combined.keys() for pair in ({"--shape", "model"}, {"--pim", "--profiler"}))
        assert code == 2 or other_shape or unfit, f"{combined}: {result}"
        return True
    assert code == 0, f"{combined}: {result}"
    return outcome(without, files, observations, capsys) != (code, result)


@pytest.mark.long
@pytest.mark.parametrize("pair", QUICK, ids=" ".join)
def test_an_option_has_an_effect_or_is_refused(pair, files, observations, capsys):
    judge(*pair, files, observations, capsys)


@pytest.mark.long
@pytest.mark.parametrize("first", OPTIONS)
def test_each_option_has_an_effect_beside_each_other(first, files, observations, capsys):
    """Alone it is not refused. ``PIMFLOW_ALL_PAIRS=1`` judges every pair."""
    single_option = merge_options(needs(first), {flag(first): OPTIONS[first].values[0]})
    assert outcome(single_option, files, observations, capsys)[0] == 0
    for pair in DRAWN:
        if pair[0] == first:
            judge(*pair, files, observations, capsys)
