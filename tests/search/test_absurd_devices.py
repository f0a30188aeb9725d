"""Any number in a file of a device or system is refused in one line, or searched soon with finite figures."""

import functools
import math
import re
import resource
import time
import warnings
from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from length import examples

from pimflow import zoo
from pimflow.core.region_graph import RegionGraph
from pimflow.errors import PimflowError
from pimflow.frontend import onnx_graph
from pimflow.hardware import system
from pimflow.hardware.reader import SPECS, spec_names
from pimflow.placement import search
from pimflow.relay_passes.regions.extract_regions import extract_regions

SECONDS, KILOBYTES = 15.0, 1 << 20
# Strings, comments and numbers: bare, in lists or in inline tables, but no keys.
NUMBER = re.compile(r"\"(?:\\.|[^\"\\])*\"|#.*|(?<![\w.-])(-?\d[\d.]*(?:e-?\d+)?)(?![\w.]|\s*=)")
KEY = re.compile(r"\"(?:\\.|[^\"\\])*\"|#.*|([\w-]+)\s*=")
FILES = {
    (kind, name): (SPECS / kind / f"{name}.toml").read_text(encoding="utf-8")
    for kind, names in {
        "gpu": ("rtx-2060-pim32", "a100", "h200", "v100"),
        "system": ("pimflow",),
        "pim": tuple(spec_names("pim")),
    }.items()
    for name in names
}


def numbers(text: str) -> list[tuple[str, int, int]]:
    """The numbers of a file: the key that each belongs to, and where it stands."""
    keys = [(m.end(), m[1]) for m in KEY.finditer(text) if m[1] and m[1] not in ("value", "source")]
    return [(max(k for k in keys if k[0] <= m.start())[1], *m.span(1)) for m in NUMBER.finditer(text) if m[1]]


FIELDS = [(kind, name, n) for (kind, name), text in FILES.items() for n in range(len(numbers(text)))]
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


def edit_file(path: Path, kind: str, name: str, index: int, value: float) -> tuple[Path, str]:
    """The file of a device with another number in place of one, and the key of that."""
    text = FILES[kind, name]
    field, begin, end = numbers(text)[index]
    path.write_text(f"{text[:begin]}{value!r}{text[end:]}", encoding="utf-8")
    return path, field


def rate(name: str, value: float, gpu: str = "rtx-2060-pim32") -> tuple[tuple[str, str, int], float, float]:
    """A constant of the GPU model that times were infinite with, or a traceback."""
    file = ("gpu", gpu)
    (index,) = (n for n, (field, *_) in enumerate(numbers(FILES[file])) if field == name)
    return (*file, index), value, value


@pytest.mark.long
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
@example(*rate("tile_power_fp16", 1e6, "h200"))  # NumPy warned, on two lines
def test_any_number_is_refused_or_searched(tmp_path_factory, place, integer, real):
    kind, name, index = place
    for value in (integer, real):
        path, field = edit_file(tmp_path_factory.mktemp("device") / "mine.toml", kind, name, index, value)
        warnings.simplefilter("error", RuntimeWarning)  # NumPy prints a warning on two lines
        begin, size = time.process_time(), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        try:
            search_result = search(toy(), system(path) if kind == "system" else system(**{kind: str(path)}))
        except PimflowError as error:
            assert error.exit_code in (2, 3, 4) and "\n" not in str(error)
            # Where refreshes leave no time for a command, the message names its region and nREFI.
            assert field in str(error) or "mine" in str(error) or "nREFI is too short" in str(error), error
        else:
            tasks = [t for row in search_result.table.candidates.values() for c in row for t in c.tasks]
            figures = [figure for t in tasks for figure in (t.execution_ns, *t.energies_pj.values())]
            figures += [search_result.evaluation.latency_ns, search_result.baseline.latency_ns]
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
    with pytest.raises(PimflowError, match=f"field 'efficiency.{key}': 0.* is not a finite number above"):
        system(gpu=str(path))


@pytest.mark.long
def test_numbers_in_tables_are_drawn():
    """Of a table in a line, of a section, of one of several sections of a name."""
    drawn = {(kind, numbers(FILES[kind, name])[index][0]) for kind, name, index in FIELDS}
    assert {("gpu", "fp16"), ("gpu", "dram"), ("pim", "nRCDR"), ("pim", "queue")} <= drawn
    text = 'a = [1, 2] # 3\nb = { c = 4, source = "5" }\nd_6 = { value = 7e-1, source = "8" }\n'
    assert [(key, text[begin:end]) for key, begin, end in numbers(text)] == [
        ("a", "1"), ("a", "2"), ("c", "4"), ("d_6", "7e-1"),
    ]  # fmt: skip
