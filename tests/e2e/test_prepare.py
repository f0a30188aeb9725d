"""Do all commands search, place and plan the same network for the same options, and refuse what is none?"""

import contextlib
from dataclasses import replace

import pytest
import tvm
import tvm_ffi
from branching import wide_branches
from papers import temco_variants
from skip_networks import hourglass
from tvm import relay

import pimflow
from pimflow import frontend
from pimflow.commands.shared import prepare
from pimflow.commands.shared.options import NetworkOptions
from pimflow.commands.shared.search_arguments import SearchArguments
from pimflow.errors import UnknownNameError, UsageError
from pimflow.hardware import system
from pimflow.pim_backend.runtime import targets

SYSTEM = system()


def build_by_relax(mod, target, **options):
    with targets.target_by_name(target):
        pimflow.relax_pipeline(SYSTEM, **options)(mod)


def build_by_relay(mod, target, **options):
    config = {f"pimflow.{name}": value for name, value in options.items()}
    with tvm.transform.PassContext(config=config):
        relay.build(mod, target=target)


# All that take a network and options.
COMMANDS = {
    "compile": lambda mod, target, **more: pimflow.compile(mod, target=target, **more, conventions="none"),
    "search": lambda mod, target, **options: pimflow.search(mod, target=target, **options),
    "search_network": lambda mod, target, **options: pimflow.search_network(
        frontend.load(mod), target=target, **options
    ),
    "relax_pipeline": build_by_relax,
    "relay.build": build_by_relay,
    "trace_plan": lambda mod, target, **options: pimflow.trace_plan(mod, target=target, **options),
    "plan_memory": lambda mod, target, **options: pimflow.plan_memory(mod, SYSTEM, target=target, **options),
}
OPTIONS = [
    ({}, "llvm+pim"),
    ({"reorder": True, "fuse": True}, "llvm+pim"),
    pytest.param(
        {"decompose": "tucker:0.1", "optimize_skips": "paper", "fuse_activations": True, "reorder": True},
        "llvm+pim",
        marks=pytest.mark.long,
    ),
    pytest.param(
        {"decompose": "tucker:0.5,where=pays", "optimize_skips": "pool", "reorder": True},
        "cuda+pim",
        marks=pytest.mark.long,
    ),
]


class Prepared(Exception):
    """Nothing is searched: that takes long, and is not what is asked."""


@pytest.fixture(scope="module")
def mod():
    return frontend.load(hourglass()).module


def prepare_by_command(monkeypatch, command, mod, target, options, cache):
    """What a command prepares; `known` has what was made of the same network and arguments before."""
    real, preparations = prepare.prepare, []

    def record_preparation(network, requested_options, target_system, request):
        decides = {name: getattr(request, name) for name in ("target", "plan", "goal", "pools", "samples")}
        key = (tvm_ffi.structural_hash(network.module), repr((requested_options, target_system, decides)))
        if key not in cache:
            cache[key] = real(network, requested_options, target_system, request)
        preparations.append(cache[key])
        raise Prepared

    with monkeypatch.context() as patch:
        patch.setattr(prepare, "prepare", record_preparation)
        with contextlib.suppress(Prepared, RuntimeError):  # which TVM makes of it inside a pass
            COMMANDS[command](mod, target, **options)
    (preparation,) = preparations
    return preparation


def skips_and_order(prepared):
    skips, order = prepared.skips, prepared.order
    return skips and skips.summary(), order and replace(order.summary(), seconds=0.0)


@pytest.mark.long
@pytest.mark.parametrize(("options", "target"), OPTIONS)
def test_all_commands_prepare_the_same_network(monkeypatch, mod, options, target):
    cache = {}
    first, *others = (
        prepare_by_command(monkeypatch, command, mod, target, options, cache)
        for command in COMMANDS
        if command != "plan_memory" or "pays" not in options.get("decompose", "")  # which needs a search
    )
    for preparation in others:
        tvm.ir.assert_structural_equal(first.network.module, preparation.network.module)
        assert preparation.options == first.options and skips_and_order(preparation) == skips_and_order(first)
        assert preparation.regions == first.regions and preparation.original_regions == first.original_regions


@pytest.mark.long
def test_an_order_is_judged_with_activations_fused():
    """Another order would make the pool smaller, but fusing alone makes it as small: it is kept."""
    mod, orders = frontend.load(wide_branches()).module, {}
    for fuse in (False, True):
        options = NetworkOptions(decompose="tucker:0.1", fuse_activations=fuse, reorder=True)
        order = prepare.prepare(prepare.load(mod, options), options, SYSTEM).order
        memory_plan = pimflow.plan_memory(mod, SYSTEM, options=options)
        assert memory_plan.plan.pool_bytes == memory_plan.order.pool_bytes == order.pool_bytes
        assert memory_plan.order.pool_given_bytes == order.pool_given_bytes
        orders[fuse] = order
    assert orders[False].changed and not orders[True].changed
    assert orders[True].pool_bytes < orders[False].pool_bytes


@pytest.mark.long
def test_what_saves_memory_is_judged_by_the_target(mod):
    """A GPU stores fp16, the CPU that stands in for it fp32."""
    options = NetworkOptions(decompose="tucker:0.1", optimize_skips="pool")
    network = prepare.load(mod, options)
    cpu, gpu = (
        prepare.prepare(network, options, SYSTEM, prepare.PreparationRequest(target=target)).skips
        for target in ("llvm+pim", "cuda+pim")
    )
    assert gpu.pool_bytes < 0.6 * cpu.pool_bytes and gpu.pool_given_bytes < 0.6 * cpu.pool_given_bytes


@pytest.mark.long
def test_variants_reduce_skips_as_a_search_does(mod):
    variants = temco_variants.decomposition_variants(mod, SYSTEM)
    options = NetworkOptions(decompose="tucker:0.1", optimize_skips="pool")
    prepared = prepare.prepare(prepare.load(mod, options), options, SYSTEM)
    tvm.ir.assert_structural_equal(variants.networks["skip-opt"].module, prepared.network.module)
    assert prepared.skips.changed


@pytest.mark.parametrize(
    ("keywords", "error", "said"),
    [
        ({"objectve": "edp"}, UnknownNameError, "unknown keyword 'objectve'; did you mean objective"),
        ({"fuse": 1}, UsageError, r"fuse is True or False, not 1 \(int\)"),
        ({"reorder": "yes"}, UsageError, "reorder is True or False, not 'yes'"),
        ({"batch": "2"}, UsageError, "batch is a whole number or None, not '2'"),
        ({"batch": True}, UsageError, "batch is a whole number"),
        ({"shapes": [1, 2]}, UsageError, "shapes is a mapping of input names"),
        ({"shapes": {"x": 3}}, UsageError, "the shape of 'x' is a tuple of sizes, not 3"),
        ({"shapes": {"x": (1.5,)}}, UsageError, "a size of 'x' is a whole number"),
        ({"decompose": 0.1}, UsageError, "decompose is a Request or its text"),
        ({"decompose": "tukker:0.1"}, UsageError, "tukker"),
        ({"optimize_skips": "most"}, UnknownNameError, "unknown criterion 'most'"),
        ({"optimize_skips": 3}, UsageError, "optimize_skips is the name of a criterion"),
        ({"objective": 3}, UsageError, "objective is a name, not 3"),
        ({"solver": ["dp"]}, UsageError, r"solver is a name, not \['dp'\]"),
        ({"modes": 3}, UsageError, "modes are names"),
        ({"modes": ["gpu", 3]}, UsageError, "modes are names"),
        ({"primitives": "all"}, UsageError, "primitives is True or False, not 'all'"),
        ({"max_latency_ns": "2ms"}, UsageError, "max_latency_ns '2ms' is no number above zero"),
    ],
)
def test_a_wrong_keyword_is_refused(keywords, error, said):
    with pytest.raises(error, match=said):
        SearchArguments.from_keywords(keywords)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"profiling": 3}, "profiling is a Profiling"),
        ({"profiling": "analytic"}, "'analytic' is not of the form gpu=SOURCE or pim=SOURCE"),
        ({"plan": 3}, "plan is a Plan, what search returned or a file"),
        ({"options": {"fuse": True}}, "options is a NetworkOptions or None"),
        ({"goal": "edp"}, "goal is a Goal or None"),
        ({"select": "measured"}, "a selection is a SelectionOptions or a mapping"),
        ({"select": {"profil": "measured"}}, "unknown option of a selection 'profil'; did you mean profile"),
        ({"select": {"measure": "all"}}, "measure is a whole number or None, not 'all'"),
        ({"tolerance": "1e-3"}, "tolerance is a number between 0 and 1"),
    ],
)
def test_a_wrong_argument_of_compile_is_refused(arguments, said):
    with pytest.raises(UsageError, match=said):
        pimflow.compile("toy", **arguments)


def test_keywords_stand_in_place_of_fields():
    arguments = SearchArguments.from_keywords(
        {
            "fuse": False,
            "objective": "edp",
            "options": NetworkOptions(fuse=True, reorder=True),
            "goal": pimflow.Goal(solver="exhaustive"),
        }
    )
    assert arguments.options == NetworkOptions(reorder=True)
    assert arguments.goal == pimflow.Goal(solver="exhaustive", objective="edp")
