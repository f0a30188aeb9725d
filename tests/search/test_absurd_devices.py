"""Any number in a file of a device or system is refused in one line, or searched soon with finite figures."""

import functools
import math
import re
import resource
import time
from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from length import examples

from pimflow import zoo
from pimflow.core.region import RegionGraph
from pimflow.errors import PimflowError
from pimflow.frontend import onnx_graph
from pimflow.hardware import system
from pimflow.hardware.reader import SPECS
from pimflow.placement import search
from pimflow.relay_passes.regions.extract_regions import extract_regions

SECONDS, KILOBYTES = 15.0, 1 << 20
NUMBER = re.compile(r"^(\w+) = (?:\{ value = )?(-?\d[\d.]*(?:e-?\d+)?)", re.M)
FILES = {
    ("gpu", "rtx-2060-pim32"): (SPECS / "gpu" / "rtx-2060-pim32.toml").read_text(encoding="utf-8"),
    ("system", "pimflow"): (SPECS / "system" / "pimflow.toml").read_text(encoding="utf-8"),
    **{
        ("pim", name): (SPECS / "pim" / f"{name}.toml").read_text(encoding="utf-8")
        for name in ("newton-gddr6", "hbm-pim", "aim-gddr6")
    },
}
FIELDS = [(kind, name, match[1]) for (kind, name), text in FILES.items() for match in NUMBER.finditer(text)]
WHOLE = st.one_of(
    st.sampled_from([0, 1, 2, 3, 1000, 10**6, 2**31 - 1, 2**31, 2**63, -1]), st.integers(0, 2**33)
)
REAL = st.one_of(
    st.sampled_from([0.0, -0.0, 1e-17, 1e-6, 1e6, 9e17, 1e18, 1e300, 5e-324, math.nan, math.inf, -1.0]),
    st.floats(),
    st.floats(1e-18, 1e18),
)


@functools.cache
def toy() -> RegionGraph:
    return extract_regions(onnx_graph.from_onnx(zoo.load("toy")), "toy")


def edited(path: Path, kind: str, name: str, field: str, value: float) -> Path:
    """The file of a device with another number in a field."""
    match = next(match for match in NUMBER.finditer(FILES[kind, name]) if match[1] == field)
    begin, end = match.span(2)
    text = FILES[kind, name]
    path.write_text(f"{text[:begin]}{value!r}{text[end:]}", encoding="utf-8")
    return path


def rate(name: str, value: float) -> tuple[tuple[str, str, str], float, float]:
    """A constant of the GPU model that times are divided by; they were infinite, or a traceback."""
    return ("gpu", "rtx-2060-pim32", name), value, value


@settings(max_examples=examples(100), deadline=None)
@given(st.sampled_from(FIELDS), WHOLE, REAL)
@example(*rate("channel_spread", 0.0))
@example(*rate("dram", 0.0))
@example(*rate("dram_write_stream", 0.0))
@example(*rate("l2", 0.0))
@example(*rate("mma", 0.0))
@example(*rate("sm_port_bytes_per_cycle", 0.0))
@example(*rate("stream", 0.0))
@example(*rate("split_limit", 0.5))
def test_any_number_is_refused_or_searched(tmp_path_factory, place, whole, real):
    kind, name, field = place
    for value in (whole, real):
        path = edited(tmp_path_factory.mktemp("device") / "mine.toml", kind, name, field, value)
        begin, size = time.process_time(), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        try:
            found = search(toy(), system(path) if kind == "system" else system(**{kind: str(path)}))
        except PimflowError as error:
            assert error.exit_code in (2, 3, 4) and "\n" not in str(error)
            assert field in str(error) or "mine" in str(error), error
        else:
            tasks = [t for of in found.table.candidates.values() for c in of for t in c.tasks]
            figures = [figure for t in tasks for figure in (t.execution_ns, *t.energies_pj.values())]
            figures += [found.evaluation.latency_ns, found.baseline.latency_ns]
            assert all(math.isfinite(figure) and figure >= 0 for figure in figures)
        assert time.process_time() - begin < SECONDS
        assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - size < KILOBYTES


@pytest.mark.parametrize("key", ["mma_fp16", "l2_depthwise_3x3_s1_fp16", "depthwise_depthwise_3x3_s2_fp32"])
def test_rates_of_classes_of_kernels_are_above_zero(tmp_path, key):
    text = (SPECS / "gpu" / "v100.toml").read_text(encoding="utf-8")
    changed, count = re.subn(rf"^{key} = \{{ value = [\d.]+", f"{key} = {{ value = 0", text, flags=re.M)
    if not count:
        changed = text.replace("[efficiency]", f"[efficiency]\n{key} = 0", 1)
    path = tmp_path / "mine.toml"
    path.write_text(changed, encoding="utf-8")
    with pytest.raises(
        PimflowError, match=f"field 'efficiency.{key}': 0.* is not a finite number above zero"
    ):
        system(gpu=str(path))
