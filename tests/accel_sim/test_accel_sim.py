"""Do Accel-Sim's cycles reach the costs, and does each failure end in one line?"""

import dataclasses
import gzip
import itertools
import json
import os
import re
import shlex
import shutil
import stat
import subprocess
import sys
from pathlib import Path

import pytest
from calibration.accel_sim_accuracy import HeldOutKernel, leave_one_out, replace_table, summary
from calibration.gpu_fit import fit
from calibration.samples import STREAM, read_samples

from pimflow.commands.main import main
from pimflow.core.candidate import Provenance
from pimflow.core.kernel import ConvGeometry, Kernel, convolution_kernel
from pimflow.errors import ProfilerError, SpecError, TraceError, UsageError
from pimflow.hardware import GpuSpec
from pimflow.simulators.accel_sim.kernels import kernel_name, launches
from pimflow.simulators.accel_sim.profiler import AccelSim, AccelSimLogs
from pimflow.simulators.gpu.model import KernelCost, KernelRequest, kernel_cost, kernel_energy_pj
from pimflow.simulators.profiler import GpuProfiler

ROOT = Path(__file__).parents[2]
DATA = Path(__file__).parent / "data"
CYCLES = ROOT / "tests" / "gpu_model" / "data" / "accelsim_rtx2060.csv"
GPU = GpuSpec.load("rtx-2060-pim32")
POINTWISE = convolution_kernel(ConvGeometry(n=1, h=28, w=28, c=32, oc=192), "fp16")
COPY = Kernel(kind="stream", input_bytes=4096, output_bytes=4096)
SPLIT_PRODUCT = convolution_kernel(ConvGeometry(n=32, h=1, w=1, c=2048, oc=128), "fp16")
REQUESTS = [KernelRequest(kernel, channels) for kernel in (POINTWISE, COPY) for channels in (16, 32)]

# Prints what the real logs print, of the traces and options that it was given; its clock is that of an
# empty kernel, 1 cycle a line, and the fewer channels the more.
FAKE = """#!{python}
import pathlib, sys

arguments = sys.argv[1:]
assert arguments[0] == "-trace", arguments
options = {{}}
for option, value in zip(arguments[2::2], arguments[3::2]):
    if option != "-config":
        options[option] = value
        continue
    for line in pathlib.Path(value).read_text().splitlines():
        if line.startswith("-"):
            options[line.split()[0]] = line.split()[1]
assert options["-trace_opcode_latency_initiation_int"] == "4,1"
assert pathlib.Path("network.icnt").exists()
open({runs!r}, "a").write(arguments[1] + "\\n")
print("Accel-Sim [build accelsim]")
for name in ("-gpgpu_n_mem", "-gpgpu_clock_domains", "-gpgpu_n_clusters"):
    print(name, " ", options[name], "# what it means")
cycles = instructions = reads = 0
folder = pathlib.Path(arguments[1]).parent
for number, file in enumerate(pathlib.Path(arguments[1]).read_text().split(), 1):
    lines = (folder / file).read_text().splitlines()
    name = next(line for line in lines if line.startswith("-kernel name = "))[15:]
    masks = [line.split()[1] for line in lines if line[:1].isalnum() and "=" not in line]
    count = sum(bin(int(mask, 16)).count("1") for mask in masks)
    took = 5008 + len(masks) + 3200 // int(options["-gpgpu_n_mem"])
    cycles, instructions, reads = cycles + took, instructions + count, reads + 100
    print(f'''kernel_name = {{name}} 
kernel_launch_uid = {{number}} 
gpu_sim_cycle = {{took}}
gpu_sim_insn = {{count}}
gpu_ipc =      {{count / took:.4f}}
gpu_tot_sim_cycle = {{cycles}}
gpu_tot_sim_insn = {{instructions}}
gpu_occupancy = 25.0000% 
L2_BW  =      13.6500 GB/Sec
total dram reads = {{reads}}
total dram writes = {{50 * number}}
''')
{more}
print("GPGPU-Sim: *** exit detected ***")
{last}
"""
CONFIG = """-gpgpu_n_clusters 30
-gpgpu_n_mem 12
-gpgpu_n_mem_per_ctrlr 1
-gpgpu_clock_domains 1365:1365:1365:3500.5
"""


def install(folder: Path, extra: str = "", config: str = CONFIG, text: str = FAKE, last: str = "") -> Path:
    """A directory with the stand-in and its configuration; `more` is run before its closing line."""
    (folder / "bin").mkdir(parents=True)
    (folder / "config").mkdir()
    program = folder / "bin" / "accel-sim.out"
    runs = str(folder / "runs")
    program.write_text(text.format(python=sys.executable, runs=runs, more=extra, last=last))
    program.chmod(program.stat().st_mode | stat.S_IXUSR)
    (folder / "config" / "gpgpusim.config").write_text(config)
    (folder / "config" / "trace.config").write_text("-trace_opcode_latency_initiation_int 4,1\n")
    (folder / "config" / "network.icnt").write_text("")
    return folder


@pytest.fixture
def installation(tmp_path):
    return install(tmp_path / "accel-sim")


def runs(folder: Path) -> int:
    return len((folder / "runs").read_text().splitlines())


def cycles_of(kernel: Kernel, channels: int) -> int:
    """What the stand-in's clock must be."""
    total = 0
    for launch in launches(kernel, GPU, "fp16", channels):
        codes = (launch.warps(index[::-1]) for index in itertools.product(*map(range, launch.grid[::-1])))
        total += 5008 + sum(code.count for block in codes for code in block) + 3200 // channels
    return total


# --- running it ---


def test_its_clock_is_the_time(installation):
    profiler: GpuProfiler = AccelSim(str(installation))
    costs = profiler.costs([*REQUESTS, *REQUESTS], GPU, "fp16")
    assert costs[:4] == costs[4:]
    assert runs(installation) == len(REQUESTS)
    for request, cost in zip(REQUESTS, costs):
        count = len(launches(request.kernel, GPU, "fp16", request.channels))
        cycles = cycles_of(request.kernel, request.channels)
        assert cost.provenance is Provenance.SIMULATED
        assert cost.launch_ns == GPU.launch_ns
        assert cost.total_ns == pytest.approx(cycles / 1365 * 1e3)
        assert cost.dram_bytes == 32 * 150 * count
        assert cost.l2_bytes == pytest.approx(13.65 * cycles / 1365 * 1e3)


def test_it_is_found_by_its_executable_too(installation):
    folder_run, direct = AccelSim(str(installation)), AccelSim(str(installation / "bin" / "accel-sim.out"))
    assert (folder_run.executable, folder_run.configurations) == (direct.executable, direct.configurations)
    assert folder_run.name == direct.name
    assert folder_run.name.startswith("accel-sim:")


def test_its_name_changes_with_its_configuration(installation):
    before = AccelSim(str(installation)).name
    config = installation / "config" / "gpgpusim.config"
    config.write_text(CONFIG + "-gpgpu_shmem_size 65536\n")
    assert AccelSim(str(installation)).name != before


def test_a_tested_configuration_of_a_checkout(tmp_path):
    folder = install(tmp_path / "framework")
    tested = folder / "gpu-simulator" / "gpgpu-sim" / "configs" / "tested-cfgs" / "SM75_RTX2060"
    tested.mkdir(parents=True)
    (folder / "config" / "gpgpusim.config").rename(tested / "gpgpusim.config")
    (folder / "config" / "network.icnt").rename(tested / "network.icnt")
    assert AccelSim(str(folder)).costs(REQUESTS[-1:], GPU, "fp16")[0].provenance is Provenance.SIMULATED


def test_it_leaves_nothing_behind(installation, tmp_path, monkeypatch):
    (tmp_path / "scratch").mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "scratch"))
    AccelSim(str(installation)).costs(REQUESTS[-1:], GPU, "fp16")
    assert list((tmp_path / "scratch").iterdir()) == []


@pytest.mark.long
@pytest.mark.parametrize(
    ("more", "said"),
    [
        ("sys.exit(3)", r"failed \(exit code 3\)"),
        ("sys.exit('out of memory')", r"failed \(exit code 1: out of memory\)"),
        ("import os; os.kill(os.getpid(), 11)", r"failed \(signal 11\)"),
        ("sys.exit(0)", "no line 'GPGPU-Sim: .*exit detected"),
        ("import os; os._exit(0)", "no line 'GPGPU-Sim: .*exit detected"),
        ("print('kernel_name = more')", r"its output\.log.*kernel 'more' has no line"),
        ("import time; sys.stdout.flush(); time.sleep(60)", "no end after 2 s"),
    ],
)
def test_failures_of_the_simulator(more, said, tmp_path):
    broken = AccelSim(str(install(tmp_path / "a", more)), timeout_seconds=2)
    with pytest.raises(ProfilerError, match=said) as caught:
        broken.costs(REQUESTS[-1:], GPU, "fp16")
    assert "\n" not in str(caught.value)
    assert str(caught.value).startswith(f"accel-sim '{tmp_path / 'a'}'")


@pytest.mark.long
@pytest.mark.parametrize("last", ["sys.exit(1)", "sys.exit('the end')", "import os; os._exit(0)"])
def test_a_run_is_whole_by_its_closing_line(last, tmp_path):
    """The `main` of PIMFlow's branch returns 1."""
    last = f"sys.stdout.flush(); {last}"
    returns_1 = AccelSim(str(install(tmp_path / "a", last=last)))
    returns_0 = AccelSim(str(install(tmp_path / "b")))
    assert returns_1.costs(REQUESTS, GPU, "fp16") == returns_0.costs(REQUESTS, GPU, "fp16")


@pytest.mark.parametrize(("status", "said"), [(0, "the run was interrupted"), (1, r"failed \(exit code 1\)")])
@pytest.mark.parametrize("cut", ["kernel_launch_uid", "total dram writes", "GPGPU-Sim: ***"])
def test_a_log_that_was_cut_off_is_refused_whatever_the_exit_status(cut, status, said, tmp_path):
    stops = """
import io
class Cut(io.StringIO):
    def write(self, text):
        whole = sys.__stdout__.write(text.partition({cut!r})[0])
        if {cut!r} in text:
            sys.__stdout__.flush()
            import os; os._exit({status})
        return whole
sys.stdout = Cut()
"""
    text = FAKE.replace("arguments = sys.argv[1:]", "{stops}\narguments = sys.argv[1:]")
    text = text.replace("{stops}", stops.format(cut=cut, status=status).replace("{", "{{").replace("}", "}}"))
    broken = AccelSim(str(install(tmp_path / "a", text=text)))
    with pytest.raises(ProfilerError, match=said):
        broken.costs(REQUESTS[-1:], GPU, "fp16")


LINKER = """#!/bin/sh
echo "$0: error while loading shared libraries: libcudart.so.11.0: cannot open shared object file: No such \
file or directory" >&2
exit 127
"""


@pytest.mark.parametrize(("place", "path"), [("gpu-simulator/gpgpu-sim/lib/gcc/release", "/a:/b"), ("", "")])
def test_a_missing_library_is_named(place, path, tmp_path, monkeypatch):
    """However long the path is with which the linker's sentence begins."""
    folder = install(tmp_path / ("far" * 40), text=LINKER)
    library_place = "the directory that has it"
    if place:
        (folder / place).mkdir(parents=True)
        (folder / place / "libcudart.so.11.0").write_bytes(b"")
        library_place = f"'{folder / place}'"
    monkeypatch.setenv("LD_LIBRARY_PATH", path)
    with pytest.raises(ProfilerError) as caught:
        AccelSim(str(folder)).costs(REQUESTS[-1:], GPU, "fp16")
    now = f"'{path}'" if path else "empty"
    assert str(caught.value) == (
        f"accel-sim '{folder}': no shared library 'libcudart.so.11.0': add {library_place} to "
        f"LD_LIBRARY_PATH, which is {now}"
    )


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("count = sum(", "count = 1 + sum(", "it counts .* instructions of 'stream_.*, whose trace has"),
        ("[15:]", "[16:]", "it ran tream_.* instead of stream_"),
        ('options["-gpgpu_n_mem"])', 'options["-gpgpu_n_mem"]) - 2000', "cycles are fewer than the launch"),
        ('options[name], "#', '{{**options, "-gpgpu_n_mem": 12}}[name], "#', "ran with 12 memory channels"),
    ],
)
def test_a_log_of_something_else(old, new, said, tmp_path):
    assert FAKE.count(old) == 1
    folder = install(tmp_path / "a", text=FAKE.replace(old, new))
    with pytest.raises(ProfilerError, match=said):
        AccelSim(str(folder)).costs(REQUESTS[-1:], GPU, "fp16")


@pytest.mark.parametrize(
    ("option", "said"),
    [
        ("-gpgpu_clock_domains 1200:1:1:1", "-gpgpu_clock_domains 1200; gpu 'rtx-2060-pim32' has 1365"),
        ("-gpgpu_n_clusters 34", r"SMs \(-gpgpu_n_clusters\) 34; .* has 30"),
    ],
)
def test_a_configuration_of_another_gpu(option, said, tmp_path):
    folder = install(tmp_path / "a", config=f"{CONFIG}{option}\n")
    with pytest.raises(SpecError, match=said):
        AccelSim(str(folder)).costs(REQUESTS[-1:], GPU, "fp16")


def test_what_is_not_there(tmp_path):
    with pytest.raises(ProfilerError, match="there is no such file"):
        AccelSim(str(tmp_path / "none"))
    (tmp_path / "empty").mkdir()
    with pytest.raises(ProfilerError, match=r"no accel-sim\.out in it or its bin"):
        AccelSim(str(tmp_path / "empty"))
    folder = install(tmp_path / "a")
    (folder / "config" / "trace.config").unlink()
    with pytest.raises(ProfilerError, match=r"no trace\.config next to it"):
        AccelSim(str(folder))
    (folder / "bin" / "accel-sim.out").chmod(0o644)
    with pytest.raises(ProfilerError, match="is not an executable file"):
        AccelSim(str(folder))


def test_fp32_is_refused(installation):
    with pytest.raises(UsageError, match="fp16 kernels"):
        AccelSim(str(installation)).costs(REQUESTS[:1], GPU, "fp32")


# --- logs ---


REAL_INSTRUCTIONS = 343296


def real_log(
    directory: Path, channels: int = 32, file: str | None = None, instructions: int | None = None
) -> Path:
    """The log of the real kernel, under the name of ours and with as many instructions."""
    text = gzip.decompress((DATA / "pw_784x192x32.32.log.gz").read_bytes()).decode()
    name = kernel_name(POINTWISE, "fp16")
    text = text.replace("pw_784x192x32", name)
    text = text.replace("-gpgpu_n_mem                           32", f"-gpgpu_n_mem {channels}")
    if instructions is None:
        (launch,) = launches(POINTWISE, GPU, "fp16", channels)
        instructions = launch.instructions()
    text = text.replace(f"insn = {REAL_INSTRUCTIONS}", f"insn = {instructions}")
    path = directory / (file or f"{name}.{channels}.log")
    path.write_text(text)
    return path


def test_kernels_with_narrow_weights_are_refused(tmp_path):
    """Logs and runs are of kernels with weights of the storage type; the GPU model counts the bytes."""
    real_log(tmp_path)
    narrow = KernelRequest(dataclasses.replace(POINTWISE, weight_share=0.28), 32)
    with pytest.raises(UsageError, match="gpu=accel-sim-logs has kernels with weights of the storage type"):
        AccelSimLogs(str(tmp_path)).costs([*REQUESTS, narrow], GPU, "fp16")


def test_a_log_is_the_cost_and_the_rest_is_the_model_scaled(tmp_path):
    real_log(tmp_path)
    costs = AccelSimLogs(str(tmp_path)).costs(REQUESTS, GPU, "fp16")
    assert [cost.provenance for cost in costs] == [
        Provenance.SCALED, Provenance.SIMULATED, Provenance.SCALED, Provenance.SCALED
    ]  # fmt: skip
    modelled = [kernel_cost(r.kernel, GPU, dtype="fp16", channels=r.channels) for r in REQUESTS]
    for key in ("execution_ns", "dram_bytes", "l2_bytes"):
        ratio = getattr(costs[1], key) / getattr(modelled[1], key)
        assert [getattr(cost, key) for cost in costs] == pytest.approx(
            [ratio * getattr(cost, key) for cost in modelled]
        )
    assert {cost.launch_ns for cost in costs} == {GPU.launch_ns}
    cost = costs[1]
    assert cost.launch_ns == GPU.launch_ns
    assert cost.total_ns == pytest.approx(9217 / 1365 * 1e3)
    assert cost.dram_bytes == 32 * (11360 + 9408)
    # 17952 packets of 32 bytes went into the network of this run.
    assert cost.l2_bytes == pytest.approx(17952 * 32, rel=1e-5)


def test_logs_by_their_content(tmp_path):
    packed = real_log(tmp_path, file="whatever.log")
    (tmp_path / "other.log.gz").write_bytes(gzip.compress(packed.read_bytes()))
    packed.unlink()
    assert AccelSimLogs(str(tmp_path)).costs(REQUESTS[1:2], GPU, "fp16")[0].provenance is Provenance.SIMULATED


def store_log(folder: Path, request: KernelRequest, logs: Path) -> KernelCost:
    """Store the log that the stand-in leaves for a trace, and return what running it costs."""
    path = logs / f"{kernel_name(request.kernel, 'fp16')}.{request.channels}.log"
    copy_command = f"import shutil; sys.stdout.flush(); shutil.copyfile('output.log', {str(path)!r})"
    (cost,) = AccelSim(str(install(folder, extra=copy_command))).costs([request], GPU, "fp16")
    path.write_text(path.read_text() + "GPGPU-Sim: *** exit detected ***\n")
    return cost


@pytest.mark.long
def test_what_it_ran_is_what_it_reads(installation, tmp_path):
    """A log that the stand-in left for a whole trace costs the same as running it."""
    logs = tmp_path / "logs"
    logs.mkdir()
    want = [store_log(tmp_path / f"run{number}", request, logs) for number, request in enumerate(REQUESTS)]
    run = AccelSim(str(installation)).costs(REQUESTS, GPU, "fp16")
    assert AccelSimLogs(str(logs)).costs(REQUESTS, GPU, "fp16") == want == run


def test_partial_sums_belong_to_their_kernel(tmp_path):
    """Both launches of a product whose reduction is split are its cost."""
    request = KernelRequest(SPLIT_PRODUCT, 32)
    assert [launch.name[-7:] for launch in launches(SPLIT_PRODUCT, GPU, "fp16", 32)][1:] == ["_reduce"]
    (tmp_path / "logs").mkdir()
    want = store_log(tmp_path / "run", request, tmp_path / "logs")
    assert AccelSimLogs(str(tmp_path / "logs")).costs([request], GPU, "fp16") == [want]
    assert want.total_ns > 2 * GPU.launch_ns * 0.99


def test_a_log_of_another_kernel_is_refused_whatever_it_is_called(tmp_path):
    """Not the name decides: the instructions that ran are those of the trace, or the log is refused."""
    real_log(tmp_path, instructions=REAL_INSTRUCTIONS)
    with pytest.raises(ProfilerError, match=rf"counts {REAL_INSTRUCTIONS} instructions .* of another kernel"):
        AccelSimLogs(str(tmp_path)).costs(REQUESTS, GPU, "fp16")


def test_logs_of_no_kernel_of_ours_are_refused(tmp_path):
    path = real_log(tmp_path)
    text = path.read_text()
    path.write_text(text.replace(kernel_name(POINTWISE, "fp16"), "somebody_elses"))
    with pytest.raises(ProfilerError, match="'somebody_elses' is no kernel whose trace pimflow writes"):
        AccelSimLogs(str(tmp_path)).costs(REQUESTS, GPU, "fp16")
    path.write_text(text)
    with pytest.raises(ProfilerError, match="no log is of a kernel of bf16"):
        AccelSimLogs(str(tmp_path)).costs(REQUESTS, GPU, "bf16")


def test_its_name_changes_with_its_logs(tmp_path):
    path = real_log(tmp_path)
    first = AccelSimLogs(str(tmp_path)).name
    (tmp_path / "notes.txt").write_text("not a log")
    assert AccelSimLogs(str(tmp_path)).name == first
    os.utime(path, ns=(1, 1))
    second = AccelSimLogs(str(tmp_path)).name
    real_log(tmp_path, channels=16)
    assert len({first, second, AccelSimLogs(str(tmp_path)).name}) == 3


def power_report(name: str, average_w: float, **components_w: float) -> str:
    lines = [f"kernel_name = {name}", f"kernel_avg_power = {average_w}"]
    lines += [f"gpu_avg_{component}, = {watts}" for component, watts in components_w.items()]
    return "\n".join([*lines, f"gpu_tot_avg_power = {average_w}", ""])


def test_power_beside_a_log_is_the_energy_of_its_kernel(tmp_path):
    """Average power over the cycles, the constant part left to the plan, which pays it all along."""
    log = real_log(tmp_path)
    profiler = AccelSimLogs(str(tmp_path))
    (priced,) = profiler.costs(REQUESTS[1:2], GPU, "fp16")
    assert priced.energies_pj is None
    name = kernel_name(POINTWISE, "fp16")
    components = {"DRAMP": 10.0, "MCP": 2, "L2CP": 3, "NOCP": 1.5, "STATICP": 8, "IDLE_COREP": 0.5, "RFP": 4}
    report = log.with_name(log.name.removesuffix(".log") + ".power")
    report.write_text(power_report(name, 32.3 + 29 + 11, CONSTP=32.3, **components))
    measured = AccelSimLogs(str(tmp_path))
    assert measured.name != profiler.name
    (cost,) = measured.costs(REQUESTS[1:2], GPU, "fp16")
    joules = {"gpu_arithmetic": 15.0, "gpu_dram": 12.0, "gpu_l2": 4.5, "gpu_leakage": 8.5}
    taken_s = 9217 / 1365e6
    energy = kernel_energy_pj(POINTWISE, cost, GPU, "fp16")
    assert energy == pytest.approx({part: watts * taken_s * 1e12 for part, watts in joules.items()})
    assert dataclasses.replace(cost, energies_pj=None) == priced
    assert kernel_energy_pj(POINTWISE, priced, GPU, "fp16") != energy


@pytest.mark.parametrize(
    ("report", "error", "said"),
    [
        (power_report("another", 70.0), TraceError, "is not the report of the run, whose kernels are gemm_"),
        (power_report("{name}", 40.0, CONSTP=32.3, DRAMP=9.0), ProfilerError, "less than its components"),
        ("nothing", TraceError, "not an AccelWattch report"),
    ],
)
def test_reports_that_cannot_be_believed(tmp_path, report, error, said):
    log = real_log(tmp_path)
    text = report.replace("{name}", kernel_name(POINTWISE, "fp16"))
    log.with_name(log.name.removesuffix(".log") + ".power").write_text(text)
    with pytest.raises(error, match=said) as caught:
        AccelSimLogs(str(tmp_path)).costs(REQUESTS[1:2], GPU, "fp16")
    assert str(tmp_path) in str(caught.value) and "\n" not in str(caught.value)


def test_directories_that_are_none(tmp_path):
    with pytest.raises(ProfilerError, match="there is no such directory"):
        AccelSimLogs(str(tmp_path / "none"))
    with pytest.raises(ProfilerError, match=r"no file \*\.log"):
        AccelSimLogs(str(tmp_path))


def test_logs_that_cannot_be_believed(tmp_path):
    path = real_log(tmp_path)
    log_text = path.read_text()
    path.write_text(log_text[: len(log_text) // 2])
    with pytest.raises(TraceError, match="the run was interrupted"):
        AccelSimLogs(str(tmp_path)).costs(REQUESTS, GPU, "fp16")
    path.write_text(log_text)
    real_log(tmp_path, file="again.log")
    with pytest.raises(ProfilerError, match=r"is in .* too; keep one"):
        AccelSimLogs(str(tmp_path)).costs(REQUESTS, GPU, "fp16")
    (tmp_path / "again.log").unlink()
    path.rename(tmp_path / "renamed.16.log")
    with pytest.raises(ProfilerError, match="ran with 32 memory channels, not with 16"):
        AccelSimLogs(str(tmp_path)).costs(REQUESTS, GPU, "fp16")
    (tmp_path / "renamed.16.log").write_text(log_text.replace("-gpgpu_n_mem ", "-n_mem "))
    assert AccelSimLogs(str(tmp_path)).costs(REQUESTS[:1], GPU, "fp16")[0].provenance is Provenance.SIMULATED
    (tmp_path / "renamed.16.log").rename(tmp_path / "renamed.log")
    with pytest.raises(ProfilerError, match=r"says no -gpgpu_n_mem; call it"):
        AccelSimLogs(str(tmp_path)).costs(REQUESTS, GPU, "fp16")
    (tmp_path / "renamed.log").unlink()
    real_log(tmp_path)
    other_gpu = dataclasses.replace(GPU, clock_mhz=1200.0)
    with pytest.raises(SpecError, match="ran with -gpgpu_clock_domains 1365"):
        AccelSimLogs(str(tmp_path)).costs(REQUESTS[1:2], other_gpu, "fp16")


@pytest.mark.long
def test_the_page_on_traces_works_as_written(installation, tmp_path, monkeypatch):
    page = (ROOT / "docs" / "traces.md").read_text(encoding="utf-8").partition("## Accel-Sim")[2]
    work = tmp_path / "work"
    shutil.copytree(installation / "config", work)
    monkeypatch.chdir(work)
    monkeypatch.setenv("PATH", str(installation / "bin"), prepend=os.pathsep)
    command = next(line for line in page.splitlines() if line.startswith("pimflow trace conv:"))
    assert main(shlex.split(command)[1:]) == 0
    subprocess.run(["bash", "-ec", re.search(r"```bash\n(.*?)```", page, re.S)[1]], check=True)
    assert runs(installation) == 2
    costs = AccelSimLogs("logs").costs(REQUESTS, GPU, "fp16")
    assert [cost.provenance is Provenance.SIMULATED for cost in costs] == [True, True, False, False]
    assert costs[:2] == AccelSim(str(installation)).costs(REQUESTS[:2], GPU, "fp16")
    named = kernel_name(POINTWISE, "fp16")
    assert f"`{named}`" in page
    assert "0100 ffffffff 0 STS.128 2 R2 R20 16 1 0x7f0000000000 16" in page
    text = "".join(p.read_text() for p in (work / "traces" / f"{named}.32").glob("*.traceg"))
    assert " STS.128 2 R2 R20 16 1 0x7f0000000000 16 \n" in text


# --- the GPU model against it ---


@pytest.mark.long
def test_a_kernel_left_out_is_predicted():
    """The quickest of the table in docs/validation.md, which scripts/validate_accel_sim.py writes."""
    samples = read_samples(CYCLES, GPU)
    subset = [s for s in samples if s.shape in ("pw_784x192x32", "read1m", "write1m", "pw_49x960x160")]
    predictions = leave_one_out(subset, GPU)
    assert [p.kernel for p in predictions] == ["pw_49x960x160", "pw_784x192x32", "read1m", "write1m"]
    assert {s.shape: s.measured_ns for s in subset if s.channels == 32} == pytest.approx(
        {prediction.kernel: prediction.cycles[32][0] / 1.365 for prediction in predictions}
    )
    left_out = next(s for s in subset if s.shape == "pw_784x192x32" and s.channels == 32)
    others = fit(GPU, [s for s in subset if s.shape != "pw_784x192x32"])
    cost = kernel_cost(left_out.kernel, others, dtype="fp16", channels=32, tile=left_out.tile)
    assert predictions[1].cycles[32] == (9217, pytest.approx(cost.total_ns * 1.365))


def test_the_page_meets_what_was_asked():
    """Its table is of the stored runs, and its sums follow from it. Copies are none of pimflow's kernels."""
    page = (ROOT / "docs" / "validation.md").read_text(encoding="utf-8")
    table = page.partition("<!-- accel-sim begin -->")[2].partition("<!-- accel-sim end -->")[0]
    errors, ratios, simulated = [], [], {}
    for line in table.splitlines():
        if line.startswith("| `"):
            kernel, *cells, ratio = (cell.strip(" `") for cell in line.strip("|").split("|"))
            for channels, cell in zip((12, 16, 32), cells):
                if cell:
                    cycles, error = cell.replace(",", "").rstrip("%)").split(" (")
                    simulated[kernel, channels] = int(cycles)
                    errors.append(abs(float(error)) / 100)
            if not STREAM.fullmatch(kernel):
                ratios.append(abs(float(ratio.rstrip("%"))) / 100)
    samples = read_samples(CYCLES, GPU)
    assert simulated == {(s.shape, s.channels): round(s.measured_ns * 1.365) for s in samples}
    mape = sum(errors) / len(errors)
    assert mape <= 0.20 and max(ratios) <= 0.15
    assert f"mean absolute error {mape:.1%}" in table


def test_errors_and_their_sums():
    first = HeldOutKernel(kernel="a", cycles={16: (100, 110.0), 32: (50, 50.0)})
    kernels = [first, HeldOutKernel(kernel="b", cycles={12: (100, 80.0)})]
    assert kernels[0].errors == {16: pytest.approx(0.1), 32: 0.0}
    assert kernels[0].ratio_error == pytest.approx(0.1)
    assert kernels[1].ratio_error is None
    sums = summary(kernels)
    assert sums["mape"] == pytest.approx(0.1) and sums["largest_ape"] == pytest.approx(0.2)
    page = replace_table("x\n<!-- accel-sim begin -->\nold\n<!-- accel-sim end -->\ny\n", kernels)
    assert "| `a` |  | 100 (+10.0%) | 50 (+0.0%) | +10.0% |" in page
    assert "old" not in page and page.startswith("x\n") and page.endswith("\ny\n")
    with pytest.raises(TraceError, match="no lines"):
        replace_table("nothing", kernels)


@pytest.mark.long
def test_the_model_beside_the_simulator(installation, tmp_path, capsys):
    """The command shows each kernel's two times; logs of one kernel leave the others out."""
    source = "conv:1x32x28x28,192,1x1"
    command = ["compare-simulator", source, "--quiet", "--json", "--profiler"]
    assert main([*command, f"gpu=accel-sim:{installation}"]) == 0
    report = json.loads(capsys.readouterr().out)
    expected = AccelSim(str(installation)).costs(REQUESTS[:2], GPU, "fp16")
    assert [row["gpu_channels"] for row in report["kernels"]] == [32, 16]
    assert [row["simulated_ns"] for row in report["kernels"]] == [cost.total_ns for cost in expected[::-1]]
    assert report["left_out"] == 0 and report["programs"] == []
    logs = tmp_path / "logs"
    logs.mkdir()
    store_log(tmp_path / "run", REQUESTS[0], logs)
    assert main([*command, f"gpu=accel-sim-logs:{logs}"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert [row["gpu_channels"] for row in report["kernels"]] == [16] and report["left_out"] == 1
    assert main([*command, f"gpu=accel-sim:{installation}", "--max-cycles", "1"]) == 0
    assert json.loads(capsys.readouterr().out)["left_out"] == 2
    assert main(["compare-simulator", source, "--quiet"]) == 2
    assert "name a simulator" in capsys.readouterr().err
    assert main([*command, "gpu=analytic"]) == 2
    assert "simulates nothing" in capsys.readouterr().err
