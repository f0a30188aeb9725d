"""Are Accel-Sim's logs and AccelWattch's reports read as printed, and cut or broken ones refused?"""

import csv
import gzip
import re
from pathlib import Path

import pytest

from pimflow.errors import TraceError
from pimflow.hardware import GpuSpec
from pimflow.simulators.accel_sim.log import SENTINEL, read_log, read_power_report
from pimflow.simulators.gpu.machine import GemmTilings
from pimflow.simulators.gpu.roofline import resident_blocks

DATA = Path(__file__).parent / "data"
CYCLES = Path(__file__).parents[1] / "gpu_model" / "data" / "accelsim_rtx2060.csv"
ROWS = {f"{r['kernel']}.{r['n_mem']}": r for r in csv.DictReader(CYCLES.read_text().splitlines())}


def text_of(name: str) -> str:
    return gzip.decompress((DATA / f"{name}.log.gz").read_bytes()).decode()


def write_log(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "run.log"
    path.write_text(text)
    return path


@pytest.mark.parametrize("name", ["empty.32", "pw_49x960x160.16", "pw_784x192x32.32"])
def test_real_logs_say_what_was_tabulated(name):
    log = read_log(DATA / f"{name}.log.gz")
    assert log.build == "Accel-Sim 2260456, GPGPU-Sim 4.2.0 9e4a0aa"
    (kernel,) = log.kernels
    row = ROWS[name]
    assert f"{kernel.name}.{log.channels}" == name
    assert kernel.cycles == log.cycles == int(row["gpu_sim_cycle"])
    assert kernel.dram_read_bytes == 32 * int(row["dram_reads_32B"])
    assert kernel.dram_write_bytes == 32 * int(row["dram_writes_32B"])
    assert log.dram_bytes == kernel.dram_read_bytes + kernel.dram_write_bytes
    assert kernel.l2_gb_s == float(row["L2_BW_GBps"])
    assert kernel.occupancy == pytest.approx(float(row["occupancy_pct"]) / 100)
    assert kernel.ipc == pytest.approx(kernel.instructions / kernel.cycles, abs=1e-4)
    assert (log.clock_mhz, log.sms) == (1365, 30)


def two_kernels() -> str:
    """A second kernel after a real one, with the totals and DRAM counts going on."""
    first = text_of("pw_784x192x32.32")
    start = first.index("kernel_name = ")
    statistics = first[start : first.index("GPGPU-Sim: *** simulation thread")]
    second = statistics
    for old, new in {
        "kernel_name = pw_784x192x32": "kernel_name = other",
        "kernel_launch_uid = 1": "kernel_launch_uid = 2",
        "gpu_sim_cycle = 9217": "gpu_sim_cycle = 6000",
        "gpu_tot_sim_cycle = 9217": "gpu_tot_sim_cycle = 15217",
        "gpu_tot_sim_insn = 343296": "gpu_tot_sim_insn = 686592",
        "total dram reads = 11360": "total dram reads = 11361",
        "total dram writes = 9408": "total dram writes = 9410",
    }.items():
        assert second.count(old) == 1
        second = second.replace(old, new)
    return first[:start] + statistics + second + SENTINEL + "\n"


def test_several_kernels(tmp_path):
    log = read_log(write_log(tmp_path, two_kernels()))
    first, second = log.kernels
    assert (first.cycles, second.cycles, log.cycles) == (9217, 6000, 15217)
    assert (second.name, second.launch_uid) == ("other", 2)
    assert (second.dram_read_bytes, second.dram_write_bytes) == (32, 64)
    assert (first.instructions, second.instructions) == (343296, 343296)


def test_a_missing_kernel_is_seen(tmp_path):
    text = two_kernels()
    cut = text[: text.index("kernel_name = pw")] + text[text.index("kernel_name = other") :]
    with pytest.raises(TraceError, match="'other' does not add up"):
        read_log(write_log(tmp_path, cut))


FAULTS = {
    "no line 'GPGPU-Sim: .* exit detected": lambda t: t.replace(SENTINEL, ""),
    "no line 'kernel_name = …'": lambda t: t[: t.index("kernel_name")] + SENTINEL,
    r":294: malformed: 'gpu_sim_cycle = many'": lambda t: t.replace("cycle = 5008", "cycle = many", 1),
    "kernel 'empty' has no line 'gpu_occupancy = …'": lambda t: t.replace("gpu_occupancy = 3.1250% \n", ""),
    ":295: 'gpu_sim_cycle' twice for 'empty'": lambda t: t.replace(
        "gpu_sim_cycle = 5008\n", "gpu_sim_cycle = 5008\n" * 2, 1
    ),
    "does not add up": lambda t: t.replace("gpu_tot_sim_cycle = 5008", "gpu_tot_sim_cycle = 5009"),
    "before the first kernel": lambda t: "gpu_sim_cycle = 4\n" + t,
    "malformed option": lambda t: t.replace("-gpgpu_n_mem         ", "-gpgpu_n_mem x", 1),
    "a kernel without a name": lambda t: t.replace("kernel_name = empty", "kernel_name ="),
}


@pytest.mark.parametrize("said", FAULTS)
def test_faults_are_named(said, tmp_path):
    broken = FAULTS[said](text_of("empty.32"))
    assert broken != text_of("empty.32")
    with pytest.raises(TraceError, match=said) as caught:
        read_log(write_log(tmp_path, broken))
    assert "run.log" in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize("share", [0.1, 0.5, 0.9, 0.999])
def test_a_log_that_was_cut_is_refused(share, tmp_path):
    text = text_of("pw_784x192x32.32")
    with pytest.raises(TraceError, match="the run was interrupted"):
        read_log(write_log(tmp_path, text[: int(len(text) * share)]))
    path = tmp_path / "cut.log.gz"
    path.write_bytes(gzip.compress(text.encode())[:2000])
    with pytest.raises(TraceError, match=r"cut\.log\.gz: cannot be read"):
        read_log(path)


def test_a_file_that_is_not_there(tmp_path):
    with pytest.raises(TraceError, match="cannot be read: No such file"):
        read_log(tmp_path / "none.log")


# As print_power_kernel_stats of gpgpu_sim_wrapper.cc writes it, by its source.
POWER = """kernel_name = gemm
kernel_launch_uid = 1

Kernel Average Power Data:
kernel_avg_power = 71.5
gpu_avg_IBP, = 1.25
gpu_avg_DRAMP, = 12
gpu_avg_CONSTP, = 32.3
gpu_avg_TOT_INST, = 120000
gpu_avg_threads_per_warp = 32
gpu_tot_TOT_INST, = 240000

Kernel Maximum Power Data:
kernel_max_power = 90
gpu_max_IBP, = 2

Accumulative Power Statistics Over Previous Kernels:
gpu_tot_avg_power = 71.5
gpu_tot_max_power = 90
gpu_tot_min_power = 60


"""


def test_a_power_report(tmp_path):
    second = POWER.replace("gemm", "copy").replace("kernel_avg_power = 71.5", "kernel_avg_power = 5e1")
    path = write_log(tmp_path, POWER + second)
    gemm, copy = read_power_report(path)
    assert (gemm.name, gemm.average_w, gemm.run_average_w) == ("gemm", 71.5, 71.5)
    assert gemm.components_w == {"IBP": 1.25, "DRAMP": 12, "CONSTP": 32.3}
    assert (copy.name, copy.average_w) == ("copy", 50)


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("gpu_tot_avg_power = 71.5\n", "", "ends within kernel 'gemm'"),
        ("kernel_avg_power = 71.5", "kernel_avg_power = -nan", ":5: no power in watts: '-nan'"),
        ("kernel_avg_power = 71.5", "kernel_avg_power = -3", ":5: no power in watts"),
        ("kernel_name = gemm\n", "", "a total without 'kernel_name'"),
        (POWER, "hello\n", "not an AccelWattch report"),
        (POWER, POWER.replace("gpu_tot_avg_power = 71.5\n", "") + POWER, ":22: kernel 'gemm' has no line"),
    ],
)
def test_broken_power_reports(old, new, said, tmp_path):
    with pytest.raises(TraceError, match=said):
        read_power_report(write_log(tmp_path, POWER.replace(old, new)))


def test_the_model_holds_as_many_blocks_as_accel_sim():
    """On an SM of the GPU that these logs are of, with the tile that their kernels have."""
    blocks_per_sm = resident_blocks(GpuSpec.load("rtx-2060-pim32"), GemmTilings([(64, 64, 1)]), 32 * 2)
    for name in ("pw_784x192x32.32", "pw_49x960x160.16"):
        with gzip.open(DATA / f"{name}.log.gz", "rt") as file:
            (count,) = re.findall(r"CTA/core = (\d+), limited by: regs", file.read())
        assert blocks_per_sm == [int(count)]
