"""Does ``pimflow profile`` time everything once, and keep it?"""

import json

import pytest
from command_line import run

from pimflow import zoo
from pimflow.commands.profile.profile import region_graph
from pimflow.commands.shared.options import NetworkOptions
from pimflow.commands.shared.profilers import forms, parse_profilers
from pimflow.errors import UsageError
from pimflow.host.result_cache import ResultCache


def test_the_second_time_nothing_is_computed(capsys, tmp_path):
    reports = []
    for _ in range(2):
        code, out, err = run(capsys, "profile toy --cache", tmp_path / "c", "--json", "--quiet", "--jobs", 2)
        assert (code, err) == (0, "")
        reports.append(json.loads(out))
    first, second = reports
    assert first["models"] == second["models"] and first["models"][0]["pim_capable"] == 7
    for section in ("layers", "kernels"):
        assert first[section]["kept"] == 0 < first[section]["computed"]
        assert second[section] == {"kept": first[section]["computed"], "computed": 0}
    assert first["known"] == second["known"] == {"analytic": first["kernels"]["computed"]}


@pytest.mark.long
def test_a_plan_is_the_same_from_the_cache(capsys, tmp_path):
    explained = []
    for cache in ("none", tmp_path / "c", tmp_path / "c"):
        code, out, _ = run(capsys, "compile toy --explain widen.conv --json --cache", cache)
        assert code == 0
        explained.append(json.loads(out))
    assert explained[0] == explained[1] == explained[2]


@pytest.mark.long
def test_another_system_is_timed_anew(capsys, tmp_path):
    options = ["profile", "toy", "--cache", tmp_path / "c", "--json", "--quiet"]
    run(capsys, *options)
    # What the change leaves as it was is not timed again: kernels on all channels, or PIM programs.
    for option, value, same in (
        ("--pim-channels", 4, "kernels"),
        ("--pim", "aim-gddr6", "kernels"),
        ("--gpu", "v100", "layers"),
        ("--dtype", "fp32", ""),
    ):
        _, out, _ = run(capsys, *options, option, value)
        report = json.loads(out)
        assert {section for section in ("layers", "kernels") if report[section]["kept"]} == {same} - {""}


def test_regions_from_the_cache_are_those_of_the_network(tmp_path):
    cache = ResultCache(tmp_path / "c")
    first, second = (region_graph("toy", NetworkOptions(), cache) for _ in range(2))
    assert first == second and first.digest == second.digest


@pytest.mark.long
def test_a_changed_file_is_read_again(tmp_path):
    import onnx

    cache = ResultCache(tmp_path / "c")
    path = tmp_path / "net.onnx"
    onnx.save(zoo.load_model("toy"), path)
    first = region_graph(path, NetworkOptions(), cache)
    proto = zoo.load_model("toy")
    proto.graph.node[0].name = "another"
    onnx.save(proto, path)
    second = region_graph(path, NetworkOptions(), cache)
    assert first.digest == region_graph("toy", NetworkOptions(), None).digest != second.digest


def test_a_flaw_of_the_cache_is_a_warning(capsys, tmp_path):
    (tmp_path / "c").write_text("no database at all" * 100)
    code, out, err = run(capsys, "profile toy --cache", tmp_path / "c")
    assert code == 0 and "PIM-capable" in out
    assert "warning" in err and "delete it" in err


@pytest.mark.parametrize(
    ("texts", "says"),
    [
        (["analytic"], "not of the form gpu=SOURCE"),
        (["gpu="], "not of the form"),
        (["tpu=analytic"], "unknown device to profile 'tpu'"),
        (["gpu=analitic"], "did you mean analytic"),
        (["gpu=analytic:x"], "not of the form gpu=analytic"),
        (["gpu=cuda:"], r"gpu=cuda\[:cold\|warm\]"),
        (["gpu=cuda:hot"], "unknown state of the L2 'hot'"),
        (["pim=ramulator"], "not of the form pim=ramulator:PATH"),
        (["pim=ramulator:"], "not of the form"),
        (["pim=ramulater:x"], "did you mean ramulator"),
        (["gpu=analytic", "gpu=analytic"], "two profilers of the gpu"),
        (["gpu=no_such_module:Own"], "unknown profiler of the gpu 'no_such_module'; .*MODULE:CLASS"),
        (["gpu=json:Own"], "module 'json' has no attribute 'Own'"),
        (["gpu=json:JSONDecoder"], "has no costs; docs/extending.md has a whole one"),
    ],
)
def test_profilers_that_there_are_not(texts, says):
    with pytest.raises(UsageError, match=says):
        parse_profilers(texts)


def test_the_forms_are_those_that_are_taken():
    gpu = ("analytic", "learned", "accel-sim:PATH", "accel-sim-logs:DIR", "cuda[:cold|warm]")
    plugins = ("gpu=MODULE:CLASS", "pim=MODULE:CLASS")
    assert forms() == [*(f"gpu={form}" for form in gpu), "pim=ramulator:PATH", *plugins]
    assert parse_profilers([]) == (None, None)
