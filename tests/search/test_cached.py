"""Attention over a cache in PIM as candidates: tasks, rows, plans, and why there are none."""

import itertools
from dataclasses import replace
from types import SimpleNamespace

import pytest
import tvm
from answers import best_label
from decoders import DecoderModel, gqa_model
from edited_plans import edited
from problems import longest_path_ns
from tvm import relax

from pimflow import frontend
from pimflow.commands.compile.explain import explain
from pimflow.commands.generate.decoding import CompiledStep, Lengths
from pimflow.commands.shared.layer_details import all_candidates
from pimflow.core.candidate import Cost, Task
from pimflow.core.plan import Plan
from pimflow.core.region import PimShape
from pimflow.core.tensor_placement import ChannelMode
from pimflow.errors import InfeasibleError, PlanError
from pimflow.hardware import system
from pimflow.host.result_cache import ResultCache
from pimflow.pim_backend.programs.cache_schedule import KEYS, VALUES, CacheSchedule
from pimflow.placement import CandidateGenerator, Costs, Goal, Profiling, plan_application, profile, search
from pimflow.placement.candidates import pim_attention
from pimflow.placement.reasons import reason
from pimflow.placement.solvers.evaluate import evaluate
from pimflow.placement.solvers.plan_search import PlanSearch
from pimflow.relay_passes.attention import attention_from_call as attention_of_value
from pimflow.relay_passes.caches import IN_PLACE, append_in_place
from pimflow.relay_passes.flat import main_bindings, operator, rebuild
from pimflow.relay_passes.pim.outline_attention import attention_sites
from pimflow.relay_passes.regions.extract_regions import extract_regions
from pimflow.simulators.gpu.region_kernels import gpu_kernels

SYSTEM = system(pim="aim-gddr6")
APART = replace(SYSTEM, channel_sharing="partitioned")
RUN = ("present.0.key", "present.0.value")


def decoder(context=512, places=None, **options):
    """The regions of a decoder whose caches stay where they are."""
    tokens = options.get("tokens", 1)
    model = DecoderModel(
        **{"heads": 8, "kv_heads": 8, "head_size": 64, "past": context - tokens} | options
    ).model()
    return extract_regions(frontend.load(model, context=context, places=places).module, "decoder")


@pytest.fixture(scope="module")
def graph():
    return decoder()


def attention_candidates(generator):
    return pim_attention.attention_candidates(generator).candidates


def attention_of(graph):
    return next(region for region in graph.regions if region.attention)


def test_a_plan_has_it(graph):
    """Both products are on PIM, with the softmax of the GPU between; only the new token is written."""
    search_result = search(graph, SYSTEM)
    region = attention_of(graph)
    chosen = search_result.candidate_by_region[region.name]
    assert chosen.covers == (*region.inputs[1:3], region.name) and chosen.rewrite.mode == "PIM"
    labels = [(task.resource, task.label) for task in chosen.tasks if task.resource != "crossbar"]
    keys, values, name = chosen.covers
    assert labels[:5] == [
        ("pim", f"{keys} (PIM)"),
        ("pim", f"{name} scores (PIM)"),
        ("pim", f"{values} (PIM)"),
        ("gpu", f"{name} (softmax)"),
        ("pim", f"{name} values (PIM)"),
    ]
    assert [task.launched for task in chosen.tasks if task.resource == "pim"] == [True, False, False, True]
    appended = 2 * 8 * 64 * 2  # bytes of a key and a value
    written = [t for t in chosen.tasks if t.resource == "crossbar" and t.label.startswith((keys, values))]
    assert sum(task.moved_bytes for task in written) >= appended
    assert sum(task.energies_pj.get("pim_write", 0.0) for task in chosen.tasks) > 0
    assert search_result.evaluation.energies_pj["pim_write"] > 0
    (placed,) = search_result.attention().values()
    assert str(placed.schedule) == chosen.rewrite.schedule
    ((of_keys, of_values),) = ((group.keys, group.values) for group in placed.groups)
    others = [c.footprint.bank_rows for c in search_result.candidates]
    before = others[: search_result.candidates.index(chosen)]
    assert of_keys.row_begin == sum(before) and chosen.footprint.bank_rows > 0
    assert of_values.row_begin == of_keys.row_begin + of_keys.rows
    assert of_keys.rows + of_values.rows == chosen.footprint.bank_rows


def test_no_combination_is_faster():
    """All combinations of all candidates, timed by the evaluator, and by a longest path."""
    graph = decoder(heads=2, kv_heads=1, hidden=8, context=256)
    table = profile(graph, CandidateGenerator(graph, APART))
    runs = attention_candidates(CandidateGenerator(graph, APART))
    few = {name: (result[:1] if len(result) < 3 else result[:2]) for name, result in table.candidates.items()}
    few[runs[0].covers[0]] = (few[runs[0].covers[0]][0], runs[0])
    table = replace(table, candidates=few)
    best_ns, of_rows = float("inf"), {}
    for chosen in itertools.product(*(few[region.name] for region in graph.regions)):
        inside = {name for c in chosen for name in c.covers[1:]}
        cover = tuple(c for c in chosen if c.covers[0] not in inside)
        latency_ns = evaluate(graph, cover, table, APART).latency_ns
        rows = sum(c.footprint.bank_rows for c in cover)
        best_ns, of_rows[rows] = min(best_ns, latency_ns), min(of_rows.get(rows, latency_ns), latency_ns)
    label = best_label(graph, table)
    assert label.latency_ns == pytest.approx(best_ns, rel=1e-9)
    assert longest_path_ns(graph, table, label.candidates) == pytest.approx(best_ns, rel=1e-9)
    assert any(map(pim_attention.is_cached, label.candidates))
    for room in sorted(of_rows)[1:]:  # fewer rows than the best plan takes
        pim = replace(APART.pim, rows_per_bank=APART.pim.row_base + room)
        result = PlanSearch(graph, table, replace(APART, pim=pim), Goal()).best()
        assert sum(c.footprint.bank_rows for c in result.candidates) <= room
        within_ns = min(ns for rows, ns in of_rows.items() if rows <= room)
        assert result.evaluation.latency_ns == pytest.approx(within_ns, rel=1e-9)


@pytest.mark.long
@pytest.mark.parametrize("objective", ("energy", "edp"))
def test_other_goals(graph, objective):
    search_result = search(graph, SYSTEM, goal=Goal(objective=objective))
    assert any(map(pim_attention.is_cached, search_result.candidates))


@pytest.mark.long
def test_a_time_shared_system(graph):
    search_result = search(graph, system(pim="aim-gddr6", channel_sharing="time-shared"))
    (chosen,) = filter(pim_attention.is_cached, search_result.candidates)
    assert chosen.channel_mode == chosen.final_channel_mode == ChannelMode.PIM


def test_nothing_is_better_than_the_front(graph):
    generator = CandidateGenerator(graph, SYSTEM)
    front = attention_candidates(generator)
    figures = [
        (Cost.from_candidate(c).latency_ns, Cost.from_candidate(c).energy_pj, c.footprint.bank_rows)
        for c in front
    ]
    for first, second in itertools.permutations(figures, 2):
        assert any(a > b for a, b in zip(first, second))
    assert len({c.name for c in front}) == len(front)


def test_parts_overlap(graph):
    """While the GPU takes the softmax of some heads, PIM multiplies the keys of others."""
    name = attention_of(graph).name
    covers = (*attention_of(graph).inputs[1:3], name)
    keys, values = "keys vector-stationary, spread 4", "values vector-stationary, spread 4"
    chosen = pim_attention.make(CandidateGenerator(graph, SYSTEM), covers, f"{keys}; {values}; 2 parts")
    labels = [task.label for task in chosen.tasks]
    of_part = [t for t in chosen.tasks if "softmax" in t.label]
    assert len(of_part) == 2
    scores = [labels.index(f"{name} scores, {n} of 2 (PIM)") for n in (1, 2)]
    softmaxes = [labels.index(f"{name} (softmax, {n} of 2)") for n in (1, 2)]
    mixed = [labels.index(f"{name} values, {n} of 2 (PIM)") for n in (1, 2)]
    assert scores[0] < softmaxes[0] < scores[1] < mixed[0]
    assert softmaxes[0] not in chosen.tasks[scores[1]].after
    for softmax, score, mix in zip(softmaxes, scores, mixed, strict=True):
        assert score in chosen.tasks[softmax].after and softmax in chosen.tasks[mix].after
    busy = sum(task.duration_ns for task in chosen.tasks if task.resource in ("gpu", "pim"))
    assert Cost.from_candidate(chosen).latency_ns < busy - of_part[0].duration_ns / 2


@pytest.mark.long
def test_a_plan_is_read_edited_and_applied(graph):
    search_result = search(graph, SYSTEM)
    plan = Plan.from_json(search_result.plan.to_json())
    reapplied = plan_application.apply(graph, SYSTEM, plan)
    assert reapplied.candidates == search_result.candidates
    assert reapplied.plan.choices == search_result.plan.choices
    assert reapplied.plan.latency_ns == pytest.approx(search_result.plan.latency_ns, rel=1e-12)
    (position,) = (i for i, c in enumerate(plan.choices) if c.mode == "PIM" and len(c.regions) > 1)
    choice = plan.choices[position]

    def apply_changed(**changes):
        choices = list(plan.choices)
        choices[position] = edited(choice, **changes)
        return plan_application.apply(graph, SYSTEM, replace(plan, choices=tuple(choices)))

    schedule = CacheSchedule.parse(choice.rewrite.schedule)
    spread = replace(
        schedule, keys=replace(schedule.keys, spread=16), values=replace(schedule.values, spread=16)
    )
    assert apply_changed(schedule=str(spread)).plan.choices[position].rewrite.schedule == str(spread)
    for wrong, why in (
        ("weights-stationary", "no schedule of attention"),
        (str(replace(schedule, keys=replace(schedule.keys, spread=3))), "there are 'keys"),
        (str(replace(schedule, parts=3)), "3 parts"),
        (f"{schedule}; 0 parts", "no schedule of attention"),
    ):
        with pytest.raises(PlanError, match=why):
            apply_changed(schedule=wrong)
    with pytest.raises(PlanError, match="gpu_share"):
        apply_changed(gpu_share=0.5)


@pytest.mark.long
def test_what_is_read_of_a_cache_is_priced_and_what_it_takes_is_held(graph):
    """On PIM products over the first places alone, in the rows of all; on the GPU the same kernels."""
    short, shorter = decoder(128, places=512), decoder(128)
    kernels = [gpu_kernels(attention_of(item), "fp16") for item in (short, shorter, graph)]
    assert kernels[0] == kernels[1] != kernels[2]
    times = [search(g, SYSTEM, goal=Goal(modes=("GPU",))).evaluation.latency_ns for g in (short, shorter)]
    assert times[0] == times[1]
    full, part = (
        {candidate.name: candidate for candidate in attention_candidates(CandidateGenerator(item, SYSTEM))}
        for item in (graph, short)
    )
    assert full.keys() & part.keys()
    for name in full.keys() & part.keys():
        assert part[name].footprint.bank_rows == full[name].footprint.bank_rows
        assert Cost.from_candidate(part[name]).latency_ns < Cost.from_candidate(full[name]).latency_ns
    plan = search(graph, SYSTEM).plan
    applied = plan_application.apply(short, SYSTEM, replace(plan, model=short.digest))
    assert [choice.rewrite for choice in applied.plan.choices] == [c.rewrite for c in plan.choices]
    layouts = [
        [str(cache.to_table()) for a in item.attention().values() for cache in (a.keys, a.values)]
        for item in (applied, search(graph, SYSTEM))
    ]
    assert layouts[0] == layouts[1]


def test_regions_are_counted_once(graph):
    search_result = search(graph, SYSTEM)
    built = SimpleNamespace(programs=search_result.programs())
    step_fields = {"lengths": Lengths(attended=512), "input_types": {}, "states": (), "outputs": ()}
    step_fields |= {"roles": {}, "logits_index": 0}
    step = CompiledStep(**step_fields, search_result=search_result, build=built, verification=None)
    layers = [c for c in search_result.candidates if c.uses_pim and not pim_attention.is_cached(c)]
    assert step.regions_on_pim == len(layers) + 3


def test_explained(graph):
    search_result, region = search(graph, SYSTEM), attention_of(graph)
    text = explain(search_result, region).text()
    assert f"* PIM {search_result.candidate_by_region[region.name].rewrite.schedule}" in text
    assert "softmax" in text
    table, second = search_result.table, (Task(label="second", resource="pim", execution_ns=1e9),)
    slow = {  # as if PIM took a second
        name: tuple(replace(c, tasks=second) if c.name.startswith("PIM keys") else c for c in candidates)
        for name, candidates in table.candidates.items()
    }
    gpu = next(c for c in table.candidates[region.name] if not c.uses_pim)
    why = reason(replace(table, candidates=slow), gpu, search_result.gpu_only, True, "no mixed plan", 1 << 20)
    assert "together take 1000000.0 us on PIM" in why and "us on the GPU" in why


REFUSED = {
    "two tokens": ({"tokens": 2, "mask": "causal"}, {}, "attention of 2 tokens"),
    "no PIM": ({}, {"pim_channels": 0}, "no PIM channels"),
    "all channels": (
        {},
        {"pim_channels": 32, "gpu": replace(SYSTEM.gpu, l2_bytes_per_channel=64)},
        "cannot hold scores",
    ),
    "the fork": ({}, {"timing": "ramulator-pimflow", "pim": "newton-gddr6"}, "no command that writes"),
}


@pytest.mark.long
@pytest.mark.parametrize("case", REFUSED)
def test_refused(case):
    options, changes, why = REFUSED[case]
    graph = decoder(**options)
    target = system(**{"pim": "aim-gddr6"} | changes)
    result = pim_attention.attention_candidates(CandidateGenerator(graph, target))
    assert not result.candidates and why in result.unsupported_reasons[attention_of(graph).name]
    table = profile(graph, CandidateGenerator(graph, target))
    assert why in table.unsupported_reasons[attention_of(graph).name]


def test_modes_without_it(graph):
    search_result = search(graph, SYSTEM, goal=Goal(modes=("GPU", "SPLIT")))
    assert not any(map(pim_attention.is_cached, search_result.candidates))
    assert not search_result.table.unsupported_reasons.keys() & {
        attention_of(graph).name,
        *attention_of(graph).inputs[1:3],
    }


def test_a_cache_that_is_copied_is_refused():
    model = DecoderModel(heads=4, head_size=16, past=31).model()
    graph = extract_regions(frontend.load(model).module, "decoder")
    assert (
        "stays where it is"
        in pim_attention.attention_candidates(CandidateGenerator(graph, SYSTEM)).unsupported_reasons[
            attention_of(graph).name
        ]
    )


def test_a_cache_that_others_read_is_refused(graph):
    region = attention_of(graph)
    shared = replace(graph, regions=(*graph.regions, replace(region, name="again")))
    assert (
        "nothing else may read them"
        in pim_attention.attention_candidates(CandidateGenerator(shared, SYSTEM)).unsupported_reasons[
            region.name
        ]
    )


@pytest.mark.long
def test_operators_in_front_of_attention():
    """They are charged for the queries that they make, however many keys there are, and explained.

    Heads of one token change places without a kernel: those are reshapes.
    """
    task_tables = []
    for places in (32, 128):
        model, _ = gqa_model(7, 1, length=places)
        states = {"past_key": "present_key", "past_value": "present_value"}
        graph = extract_regions(frontend.load(model, context=places, states=states).module, "grouped")
        region = attention_of(graph)
        assert set(region.prologue) == {"reshape"} and region.operands == len(region.inputs)
        assert not any(
            "reshape" in t.label for t in attention_candidates(CandidateGenerator(graph, SYSTEM))[0].tasks
        )
        moving = replace(region, prologue=("reshape", "permute_dims"), pim=PimShape(prologue_kernels=1))
        graph = replace(graph, regions=tuple(moving if r is region else r for r in graph.regions))
        region, generator = moving, CandidateGenerator(graph, SYSTEM)
        candidates = attention_candidates(generator)
        explained = {candidate.name for candidate in all_candidates(search(graph, SYSTEM), region)}
        assert explained >= {candidate.name for candidate in candidates}
        task_tables.append({task.label: task for task in candidates[0].tasks})
    few_places, many_places = (tasks["node (reshape, permute_dims)"] for tasks in task_tables)
    assert few_places == many_places and 2 * 64 * 2 <= few_places.moved_bytes <= 4 * 64 * 2
    few_places, many_places = (tasks["node scores (to and from PIM)"] for tasks in task_tables)
    # a tile of keys in both
    assert few_places.energies_pj["gpu_dram"] == many_places.energies_pj["gpu_dram"] > 0


def test_a_cache_that_does_not_fit(graph):
    pim = replace(SYSTEM.pim, rows_per_bank=SYSTEM.pim.row_base + 1)
    result = pim_attention.attention_candidates(CandidateGenerator(graph, replace(SYSTEM, pim=pim)))
    reason = result.unsupported_reasons[attention_of(graph).name]
    assert "KV cache of 512 tokens" in reason and "bytes a token" in reason


@pytest.mark.long
def test_caches_that_do_not_fit_together():
    """Some layers have their attention in PIM; the others say how many rows they need."""
    graph = decoder(layers=2, hidden=16, vocabulary=16, context=1024)
    wide = search(graph, SYSTEM)
    rows = [c.footprint.bank_rows for c in wide.candidates if pim_attention.is_cached(c)]
    room = sum(rows) - 1
    few = replace(SYSTEM, pim=replace(SYSTEM.pim, rows_per_bank=SYSTEM.pim.row_base + room))
    result = search(graph, few)
    assert sum(c.footprint.bank_rows for c in result.candidates) <= room
    assert wide.evaluation.latency_ns < result.evaluation.latency_ns < result.gpu_only.latency_ns
    assert len(rows) == 2 and sum(map(pim_attention.is_cached, result.candidates)) == 1
    needed = f"together take at least {min(rows)} rows of each PIM bank; the rest leaves "
    gpu_choices = [c for c in result.plan.choices if graph.region(c.region).attention and c.mode == "GPU"]
    assert gpu_choices and all(needed in c.reason for c in gpu_choices)
    with pytest.raises(InfeasibleError, match=r"caches \(\d+ bytes a token\) on the PIM channels"):
        plan_application.apply(graph, few, wide.plan)


def test_costs_are_kept(graph, tmp_path):
    for computed in (2, 0):
        cache = ResultCache(tmp_path / "kept.sqlite")
        costs = Costs(SYSTEM, Profiling(cache=cache))
        attention = attention_of(graph).attention
        first = costs.attention_costs(attention)
        assert costs.attention_costs(replace(attention, scale=2.0)) == first
        assert costs.tally.computed["pim"] == computed
        cache.close()
    short = costs.attention_costs(attention, 64)
    assert short[VALUES][0].product.time_ns < first[VALUES][0].product.time_ns
    assert short[KEYS][0].rows == first[KEYS][0].rows


def test_keys_and_values_go_to_one_position():
    """PIM appends to both by one program: where their positions differ, the GPU does attention."""
    mod = frontend.load(DecoderModel(past=7).model(), context=8).module
    main = mod["main"]
    *_, values = (b for b in main_bindings(mod) if operator(b.value) == IN_PLACE)
    position = relax.Var("other", values.value.args[1].fields[2].ty)

    def rewrite(builder, var, value):
        cache_new = value.args[1].fields[:2] if var == values.var else ()
        return append_in_place(builder, *cache_new, position) if cache_new else None

    params = [*main.params, position]
    main = relax.Function(params, main.body, main.ret_ty, main.is_pure, main.attrs)
    functions = dict(mod.functions_items()) | {mod.get_global_var("main"): main}
    apart = rebuild(tvm.IRModule(functions, attrs=mod.attrs), rewrite)
    for module, same in ((mod, True), (apart, False)):
        graph = extract_regions(module, "decoder")
        region = attention_of(graph)
        assert (pim_attention.unsupported_reason(CandidateGenerator(graph, SYSTEM), region) == "") == same
        attention = {b.var.name for b in main_bindings(module) if attention_of_value(module, b.value)}
        if same:
            assert attention_sites(module, attention)
            continue
        with pytest.raises(PlanError, match="keys and values go to different positions"):
            attention_sites(module, attention)
