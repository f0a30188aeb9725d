"""Is what ``--decompose`` asks for read as written, and refused with a reason?"""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from length import examples

from pimflow.decomposition.factors import METHODS
from pimflow.decomposition.ranks import RankRule
from pimflow.decomposition.request import DecompositionRequest
from pimflow.errors import DecompositionError, PimflowError, UnknownNameError, UsageError


def test_text():
    request = DecompositionRequest.parse("tucker:0.1")
    assert request.rules == (RankRule(kind="ratio", share=0.1),)
    assert (request.method, request.first, request.fc) == ("tucker", True, False)
    request = DecompositionRequest.parse("cp:energy=0.9,first=keep,fc=decompose")
    (rule,) = request.rules
    assert (request.method, rule.kind, request.first, request.fc) == ("cp", "energy", False, True)
    assert DecompositionRequest.parse("tt:vbmf,first=decompose").first
    assert request.where == "all" and DecompositionRequest.parse("tt:vbmf,where=pays").where == "pays"
    several = DecompositionRequest.parse("tucker:0.1:0.25:energy=0.9:vbmf,where=pays").rules
    assert [rule.text for rule in several] == ["0.1", "0.25", "energy=0.9", "vbmf"]


@pytest.mark.parametrize(
    ("text", "kind", "message"),
    [
        ("tuker:0.1", UnknownNameError, "unknown decomposition 'tuker'; did you mean tucker"),
        ("", UnknownNameError, "unknown decomposition ''"),
        ("tucker", UsageError, "no rank; give for example tucker:0.1"),
        ("tucker:1.5", UsageError, r"1.5 is not in \(0, 1\]"),
        ("tucker:0.1,frist=keep", UsageError, "unknown option 'frist'; did you mean first"),
        ("tucker:0.1,first=no", UsageError, "give first once, as one of keep, decompose"),
        ("tucker:0.1,fc=keep,fc=keep", UsageError, "give fc once"),
        ("tucker:0.1,", UsageError, "unknown option ''"),
        ("tucker:0.1:0.25", UsageError, "of several ranks a search chooses one for each layer"),
        ("tucker:0.1:0.10,where=pays", UsageError, "rank 0.1 occurs twice"),
        ("tucker:0.1:,where=pays", UsageError, "rank '': give a ratio"),
        ("tucker:none.toml", DecompositionError, "none.toml: cannot be read"),
    ],
)
def test_other_texts(text, kind, message):
    with pytest.raises(kind, match=message):
        DecompositionRequest.parse(text)


@settings(max_examples=examples(200), derandomize=True, deadline=None)
@given(st.text() | st.builds("{}:{}{}".format, st.sampled_from(METHODS), st.text(), st.text(",=.0tomlfirsc")))
def test_any_text_is_a_request_or_an_error_of_ours(text):
    try:
        request = DecompositionRequest.parse(text)
    except PimflowError as error:
        assert str(error)
    else:
        assert request.method in METHODS and all(0 < rule.share <= 1 for rule in request.rules)


def test_file(tmp_path):
    path = tmp_path / "ranks.toml"
    path.write_text('conv1 = [2, 3]\n"a.b" = 4\nc = 0.5\nd = "energy=0.9"\ne = "vbmf"\n')
    request = DecompositionRequest.parse(f"tucker:{path},where=pays")
    assert not request.rules and request.where == "pays"
    assert request.layers == {
        "conv1": RankRule(kind="ranks", ranks=(2, 3)),
        "a.b": RankRule(kind="ranks", ranks=(4,)),
        "c": RankRule(kind="ratio", share=0.5),
        "d": RankRule(kind="energy", share=0.9),
        "e": RankRule(kind="vbmf"),
    }
    request.require_layers(["conv1", "a.b", "c", "d", "e", "f"])
    with pytest.raises(
        DecompositionError, match=r"ranks\.toml: no layer 'conv1' to decompose; did you mean conv2"
    ):
        request.require_layers(["conv2", "a.b", "c", "d", "e"])
    with pytest.raises(UsageError, match="the file names the layers; leave out first"):
        DecompositionRequest.parse(f"tucker:{path},first=keep")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "names no layer"),
        ("a = ", "not a TOML file"),
        ("a = 0", "layer 'a': rank 0 is below 1"),
        ("a = []", r"layer 'a': \[\] is no rank"),
        ("a = [1, 2.5]", r"layer 'a': \[1, 2.5\] is no rank"),
        ("a = true", "layer 'a': True is no rank"),
        ("a.b = 1", "layer 'a' is a table; put a name with dots in quotes"),
        ("a = 2.5", r"layer 'a': rank '2.5': 2.5 is not in \(0, 1\]"),
        ('a = "vbmv"', "layer 'a': rank 'vbmv': give a ratio"),
        ("\0", "not a TOML file"),
    ],
)
def test_bad_files(tmp_path, text, message):
    path = tmp_path / "ranks.toml"
    path.write_text(text)
    with pytest.raises(DecompositionError, match=message) as raised:
        DecompositionRequest.parse(f"tt:{path}")
    assert str(path) in str(raised.value)
