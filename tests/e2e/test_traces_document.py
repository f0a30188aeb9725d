"""Do the commands and examples of docs/traces.md work as written?"""

import json
import re
import shlex
from pathlib import Path

import aim_reader
import pytest

from pimflow.commands.main import main
from pimflow.core.program import PimProgram
from pimflow.simulators.pim.trace import Trace
from pimflow.simulators.ramulator import load_store_trace

pytestmark = pytest.mark.long

TEXT = (Path(__file__).parents[2] / "docs/traces.md").read_text()
BLOCKS = re.findall(r"```sh\n(.*?)```", TEXT, re.DOTALL)


def example(first: str) -> str:
    """The indented block that begins with `first`."""
    lines = TEXT[TEXT.index(f"    {first}\n") :].splitlines()
    block = [line[4:] for line in lines[: next(i for i, line in enumerate(lines) if not line)]]
    return "\n".join(block) + "\n"


@pytest.fixture(scope="module")
def outputs(tmp_path_factory):
    """Every command of the page, run in one directory, and what each printed."""
    folder = tmp_path_factory.mktemp("traces")
    printed = {}
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        for line in "".join(BLOCKS).splitlines():
            program, *arguments = shlex.split(line)
            assert program == "pimflow"
            assert main(arguments) == 0, line
            printed[line] = arguments
    return folder, printed


def test_every_command_works(outputs):
    folder, printed = outputs
    assert len(printed) == 12
    for name in ("pimprog", "pim", "aim", "gpu", "perfetto", "timeline"):
        summary = json.loads((folder / name / "trace.json").read_text())
        files = {path for layer in summary["layers"] for path in layer["files_bytes"]}
        there = {str(p.relative_to(folder / name)) for p in (folder / name).rglob("*") if p.is_file()}
        assert files and there == files | {"trace.json"}
        for layer in summary["layers"]:
            for path, size in layer["files_bytes"].items():
                assert (folder / name / path).stat().st_size == size


def test_kernels_for_accel_sim(outputs):
    folder, _ = outputs
    for name, count in (("traces", 2), ("kernels", 11)):
        kernels = json.loads((folder / name / "trace.json").read_text())["kernels"]
        files = {path for kernel in kernels for path in kernel["files_bytes"]} | {"trace.json"}
        assert files == {str(p.relative_to(folder / name)) for p in (folder / name).rglob("*") if p.is_file()}
        assert len(kernels) == count
    place = folder / "traces/gemm_m784_n192_k32_h28w28c32o192_fp16.16"
    assert sorted(path.name for path in place.iterdir()) == ["kernel-1.traceg", "kernelslist.g"]


def test_the_files_are_what_the_page_says(outputs):
    folder, _ = outputs
    (layer,) = json.loads((folder / "aim/trace.json").read_text())["layers"]
    counts = aim_reader.counts(folder / "aim/conv_1x16x9x9_32_3x3_s2x1_p1.aim")
    assert counts == {name: layer["commands"].get(name, 0) for name in counts}
    assert {"GWRITE", "COMP", "READRES"} <= {name for name, count in counts.items() if count}
    (layer,) = json.loads((folder / "pim/trace.json").read_text())["layers"]
    traces = sorted((folder / "pim").glob("*/*.pim"))
    assert len(traces) == layer["pim_channels"] == 4
    assert sum(len(Trace.read(path)) for path in traces) == sum(layer["commands"].values())
    (path,) = (folder / "pimprog").glob("*.pimprog")
    assert PimProgram.load(path).to_json() == path.read_text()
    # 1280 inputs, 100 outputs of 4 bytes and their filters, in 64-byte transactions
    line_counts = load_store_trace.counts(folder / "gpu/fc_1280_100.ldst")
    assert line_counts == {"LD": (1280 + 1280 * 100) * 4 // 64, "ST": -(-100 * 4 // 64)}
    assert len(json.loads((folder / "perfetto/conv_1x24x14x14_96_1x1.perfetto.json").read_text())) == 3


def test_examples_are_what_is_written(tmp_path, capsys):
    arguments = ["--pim-channels", "1", "-o", str(tmp_path / "out")]
    for format, name, first in (
        ("pimprog", "fc_32_16.pimprog", " ["),
        ("pim", "fc_32_16/channel0.pim", "0x00000000 GWRITE"),
        ("aim", "fc_32_16.aim", "W CFR 0 1"),
        ("ramulator2", "fc_32_16.ldst", "LD 0x0"),
    ):
        assert main(["trace", "fc:32,16", "--format", format, *arguments]) == 0
        begin, _, end = example(first).partition("…\n")
        text = (tmp_path / "out" / name).read_text()
        if format == "pimprog":
            text = text.partition("\n")[2].removesuffix("]}\n")
        assert text.startswith(begin) and text.endswith(end) and (end or text == begin)
