"""Is what tiles compute twice what they would, counted pixel by pixel?"""

from hypothesis import given
from hypothesis import strategies as st

from pimflow.core.fused_tile import recomputed
from pimflow.core.region import ConvGeometry


@st.composite
def poolings(draw) -> ConvGeometry:
    h, w = draw(st.tuples(st.integers(4, 20), st.integers(4, 20)))
    window, stride = draw(st.sampled_from([(2, 2), (3, 2), (3, 1), (2, 3)]))
    return ConvGeometry(n=1, h=h, w=w, c=3, oc=3, kh=window, kw=window, stride=(stride, stride), groups=3)


@given(pooling=poolings(), rows=st.integers(1, 8), columns=st.integers(1, 8))
def test_pixels_of_every_tile(pooling, rows, columns):
    def spanned(total: int, each: int, axis: int) -> list[range]:
        stride, window = pooling.stride[axis], (pooling.kh, pooling.kw)[axis]
        parts = [(begin, min(begin + each, total)) for begin in range(0, total, each)]
        return [range(begin * stride, (end - 1) * stride + window) for begin, end in parts]

    tiles = [
        {(y, x) for y in ys for x in xs}
        for ys in spanned(pooling.oh, rows, 0)
        for xs in spanned(pooling.ow, columns, 1)
    ]
    (whole_y,), (whole_x,) = spanned(pooling.oh, pooling.oh, 0), spanned(pooling.ow, pooling.ow, 1)
    expected = sum(map(len, tiles)) / (len(whole_y) * len(whole_x))
    assert abs(recomputed(pooling, rows, columns) - expected) < 1e-9
