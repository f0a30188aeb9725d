"""Is a term of a fused group's price an upper bound on what leaving it out gains?"""

import pytest
from papers import deep_fusion_terms as terms


@pytest.mark.long
@pytest.mark.parametrize("dtype", terms.DTYPES)
def test_a_price_without_terms_is_never_higher(dtype):
    graph, system = terms.gpu_alone("toy", dtype)
    plans = {
        column: terms.fastest_plan(graph, system, left_out) for column, left_out in terms.COLUMNS.items()
    }
    times = {column: plan.evaluation.latency_ns for column, plan in plans.items()}
    assert times["all five"] < min(time for column, time in times.items() if column != "all five")
    assert max(times.values()) == times["as built"] < terms.separate_ns(graph, system)
    assert terms.separate_rates_ns(graph, system) < terms.separate_ns(graph, system)


def test_groups_move_what_the_analysis_counts():
    """Its layers are small, so that the L2 serves all tiles after the first."""
    graph, system = terms.gpu_alone("toy", "fp16")
    groups = terms.group_traffic(terms.fastest_plan(graph, system, terms.Terms()))
    assert groups and all(group.modelled_bytes == group.analysed_bytes < group.l2_bytes for group in groups)
