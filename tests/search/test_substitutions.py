"""Do registered substitutions become candidates that searches choose and plans name?"""

from itertools import pairwise
from unittest import mock

import pytest

import pimflow
from pimflow.core.kernel import Kernel
from pimflow.core.plan import Plan
from pimflow.core.rewrite import SubstitutionRewrite
from pimflow.errors import PlanError, UsageError
from pimflow.placement.candidates import substitutions
from pimflow.placement.candidates.substitutions import SUBSTITUTIONS, register


class FreePairs:
    """Two regions, of which only the second reads the first, in little more than a launch."""

    name = "free-pairs"

    def matches(self, graph):
        pairs = ((first.name, second.name) for first, second in pairwise(graph.regions))
        return [pair for pair in pairs if graph.readers[pair[0]] == pair[1:]]

    def kernels(self, regions, dtype):
        return [Kernel(kind="stream", input_bytes=4, output_bytes=64)]

    def lowering(self, groups):
        return lambda module: module


@pytest.fixture
def registered():
    with mock.patch.dict(SUBSTITUTIONS):
        register(FreePairs())
        yield


@pytest.mark.parametrize("modes", ["gpu", "gpu,pim,split"])
def test_a_substitution_that_pays_is_in_the_plan(registered, modes):
    search_result = pimflow.search("toy", modes=modes)
    covers = search_result.substitutions()["free-pairs"][0]
    choice = search_result.plan.choice(covers[0])
    assert (choice.regions, choice.rewrite) == (covers, SubstitutionRewrite(substitution="free-pairs"))
    assert not search_result.group_tilings()


@pytest.mark.long
def test_a_plan_file_brings_it_back(registered):
    search_result = pimflow.search("toy")
    plan = Plan.from_json(search_result.plan.to_json())
    applied = pimflow.search("toy", plan=plan)
    assert applied.substitutions() == search_result.substitutions()
    assert applied.evaluation.latency_ns == search_result.evaluation.latency_ns
    with mock.patch.dict(SUBSTITUTIONS, clear=True), pytest.raises(PlanError, match="together"):
        pimflow.search("toy", plan=plan)


@pytest.mark.parametrize("name", ["free-pairs", "", "tiles 1x2x2"])
def test_names_are_unique_and_no_tilings(registered, name):
    substitution = FreePairs()
    substitution.name = name
    with pytest.raises(UsageError, match="cannot be named"):
        substitutions.register(substitution)
