"""Are layers by their shape read as written, and is what is wrong with one said?"""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pimflow.core.kernel import ConvGeometry
from pimflow.core.layer_text import parse_layer
from pimflow.errors import UnknownNameError, UsageError


def test_forms():
    assert parse_layer("conv:1x24x56x56,96,1x1,s1,p0") == ConvGeometry(n=1, h=56, w=56, c=24, oc=96)
    assert parse_layer("conv:2x3x9x8,5,3x2,s2x1,p1x0,d2") == ConvGeometry(
        n=2, h=9, w=8, c=3, oc=5, kh=3, kw=2, stride=(2, 1), dilation=(2, 2), padding=(1, 0, 1, 0)
    )
    assert parse_layer("fc:1280,1000") == ConvGeometry(n=1, h=1, w=1, c=1280, oc=1000)
    assert parse_layer("fc:8x1280,1000") == ConvGeometry(n=8, h=1, w=1, c=1280, oc=1000)


size, pair = st.integers(1, 9), st.tuples(st.integers(1, 4), st.integers(1, 4))


@given(st.tuples(size, size, size, size), size, pair, pair, pair, pair, st.permutations("spd"))
def test_any_convolution(x, oc, kernel, stride, padding, dilation, order):
    options = {"s": stride, "p": padding, "d": dilation}
    parts = ["x".join(map(str, x)), str(oc), "{}x{}".format(*kernel)]
    text = ",".join([*parts, *("{}{}x{}".format(name, *options[name]) for name in order)])
    rows = (x[2] + 2 * padding[0] - (kernel[0] - 1) * dilation[0] - 1) // stride[0] + 1
    columns = (x[3] + 2 * padding[1] - (kernel[1] - 1) * dilation[1] - 1) // stride[1] + 1
    if rows < 1 or columns < 1:
        with pytest.raises(UsageError, match="does not fit"):
            parse_layer(f"conv:{text}")
        return
    geometry = parse_layer(f"conv:{text}")
    assert (geometry.n, geometry.c, geometry.h, geometry.w) == x
    assert (geometry.oh, geometry.ow, geometry.reduction) == (rows, columns, x[1] * kernel[0] * kernel[1])


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("conv:1x24x56x56,96", "2 parts of at least 3"),
        ("conv:1x24x56,96,1x1", r"input '1x24x56' has 3 numbers, not 4; write it as conv:NxCxHxW"),
        ("conv:1x24x56x56,96x2,1x1", "output channels '96x2' has 2 numbers, not 1"),
        ("conv:1x24x56x56,96,1", "kernel '1' has 1 numbers, not 2"),
        ("conv:1x24x56x56,96,1x1,q1", "part 'q1' starts with none of s, p, d"),
        ("conv:1x24x56x56,96,1x1,", "part '' starts with none of"),
        ("conv:1x24x56x56,96,1x1,s1,s2", "stride is given twice"),
        ("conv:1x24x56x56,96,1x1,s0", r"'stride' is 0, not an integer in \[1, "),
        ("conv:1x24x56x56,96,1x1,p-1", "padding '-1' is no number"),
        ("conv:1x0x56x56,96,1x1", "'input' is 0"),
        ("conv:1x24x56x56,96,1x1,s1x1x1", "stride '1x1x1' has 3 numbers, not 1 or 2"),
        ("conv:1x3x2x2,4,5x5", "the window does not fit the padded input"),
        ("conv:1x99999999999x2x2,4,1x1", "too large"),
        ("conv:1x3x100000x100000,4,1x1", "'output pixels' is 10000000000"),
        ("fc:1280", r"1 parts of 2 \(inputs, outputs\); write it as fc:"),
        ("fc:1280,1000,s1", "3 parts of 2"),
        ("fc:a,1000", "inputs 'a' is no number"),
        ("fc:²,1000", "inputs '²' is no number"),
    ],
)
def test_the_part_at_fault_is_named(text, says):
    with pytest.raises(UsageError, match=says) as raised:
        parse_layer(text)
    assert repr(text)[1:-1] in str(raised.value)


def test_an_unknown_kind_lists_what_is_near():
    with pytest.raises(UnknownNameError, match="did you mean conv"):
        parse_layer("conv2:1,1")


@pytest.mark.long
@given(st.text(max_size=30) | st.from_regex(r"(conv|fc):[0-9x,spd]{0,25}", fullmatch=True))
def test_any_text_is_a_layer_or_a_usage_error(text):
    try:
        assert parse_layer(text).pixels >= 1
    except UsageError as error:
        assert "\n" not in str(error) or "\n" in text
