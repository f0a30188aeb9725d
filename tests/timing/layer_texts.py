"""Random layers by their shape, lowered in any of their loop orders."""

from hypothesis import strategies as st

from pimflow.core.layer_text import parse_layer
from pimflow.core.program import PimProgram
from pimflow.errors import UsageError
from pimflow.hardware.pim import PimSpec
from pimflow.pim_backend.programs.lowering import ProgramRequest
from pimflow.placement.costs.pim_runs import PimTarget
from pimflow.simulators.profiler import BuiltIn

NEWTON = PimSpec.load("newton-gddr6")


@st.composite
def layer_texts(draw: st.DrawFn) -> str:
    """Layers of a few thousand commands, with reductions on both sides of a row."""
    if draw(st.booleans()):
        return f"fc:{draw(st.integers(1, 4))}x{draw(st.integers(1, 1100))},{draw(st.integers(1, 90))}"
    side = st.integers(1, 7)
    x = f"{draw(st.integers(1, 2))}x{draw(st.integers(1, 90))}x{draw(side)}x{draw(side)}"
    kernel = f"{draw(st.integers(1, 3))}x{draw(st.integers(1, 3))}"
    options = f"s{draw(st.integers(1, 2))},p{draw(st.integers(1, 2))}x1,d{draw(st.integers(1, 2))}"
    return f"conv:{x},{draw(st.integers(1, 50))},{kernel},{options}"


def is_layer(text: str) -> bool:
    try:
        parse_layer(text)
    except UsageError:
        return False
    return True


@st.composite
def layer_programs(draw: st.DrawFn) -> PimProgram:
    text = draw(layer_texts().filter(is_layer))
    channels = draw(st.integers(1, 8))
    side = PimTarget(pim=NEWTON, channels=channels, dtype="fp16", profiler=BuiltIn())
    geometry = parse_layer(text)
    schedule = draw(st.sampled_from(side.schedules(geometry)))
    return side.program(ProgramRequest(text, geometry, schedule))
