"""Regions of convolutions in a row, of which some add an earlier result."""

from hypothesis import strategies as st

from pimflow.core.kernel import ConvGeometry
from pimflow.core.region import Epilogue, KernelShape, Region
from pimflow.core.region_graph import RegionGraph


def convolution(name, source, shape, outputs, kernel=1, stride=1, groups=1, residual=None) -> Region:
    """A region with a bias, and perhaps a residual, padded so that a stride of 1 keeps the map."""
    n, h, w, c = shape
    geometry = ConvGeometry(
        n=n, h=h, w=w, c=c, oc=outputs, kh=kernel, kw=kernel, stride=(stride, stride),
        padding=(kernel // 2,) * 4, groups=groups,
    )  # fmt: skip
    result, added = (n, geometry.oh, geometry.ow, outputs), ("add",) * bool(residual)
    return Region(
        name=name,
        operator="depthwise" if geometry.is_depthwise else "conv2d",
        operators=("nn.conv2d", "add", *added),
        inputs=(source, *([residual] if residual else [])),
        input_shapes=(shape, *([result] if residual else [])),
        output_shape=result,
        geometry=geometry,
        epilogue=Epilogue(operators=("bias", *added)),
        kernel=KernelShape(weight_elements=outputs * (geometry.reduction + 1)),
    )


@st.composite
def chains(draw, shapes, lengths, channels, kernels, *, depthwise=False, residuals=True) -> RegionGraph:
    """By strategies for the shape of the input and for how many there are, and by what is sampled from."""
    shape, source = draw(shapes), "%x"
    regions, results = [], {source: shape}
    for index in range(draw(lengths)):
        groups = shape[3] if depthwise and draw(st.booleans()) else 1
        outputs = groups if groups > 1 else draw(st.sampled_from(channels))
        form = (outputs, draw(st.sampled_from(kernels)), draw(st.sampled_from((1, 1, 2))), groups)
        region = convolution(f"r{index}", source, shape, *form)
        fitting = [name for name, dims in results.items() if dims == region.output_shape and name != source]
        if residuals and groups == 1 and fitting and draw(st.booleans()):
            region = convolution(region.name, source, shape, *form, draw(st.sampled_from(fitting)))
        regions.append(region)
        source, shape = region.name, region.output_shape
        results[source] = shape
    return RegionGraph(name="drawn", regions=tuple(regions), outputs=(source,))
