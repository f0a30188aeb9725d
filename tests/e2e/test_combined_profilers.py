"""One command, two simulators: stored Accel-Sim logs for the GPU, a stand-in Ramulator for PIM.

The oracle adds up what the logs and the stand-in say, by hand.
"""

import json

import pytest
from command_line import run_json

import pimflow
from pimflow.commands.main import main
from pimflow.commands.simulate.kernel_traces import TracedKernel
from pimflow.hardware import GpuSpec, PimSpec

GPU, PIM = GpuSpec.load("rtx-2060-pim32"), PimSpec.load("newton-gddr6")
LAUNCH_CYCLES = round(GPU.launch_ns * GPU.clock_mhz / 1e3)
# Counts what the Ramulator fork counts; its clock is 3 cycles a line and 1.
RAMULATOR = """#!/bin/sh
for name in GWRITE G_ACT COMP READRES PREA PRE REF; do echo "$name $(grep -c $name "$5")"; done
echo "Cycle $(( $(wc -l < "$5") * 3 + 1 ))"
"""
# The lines of a real log that are read (tests/accel_sim has such logs).
KERNEL = """kernel_name = {name}
kernel_launch_uid = {number}
gpu_sim_cycle = {cycles}
gpu_sim_insn = {instructions}
gpu_ipc =      1.0000
gpu_tot_sim_cycle = {total_cycles}
gpu_tot_sim_insn = {total_instructions}
gpu_occupancy = 25.0000%
L2_BW  =      10.0000 GB/Sec
total dram reads = {reads}
total dram writes = {reads}
"""
# And those of an AccelWattch report: 30 W constant, 4 W leakage, 6 W for the rest.
POWER = """kernel_name = {name}
kernel_avg_power = 40
gpu_avg_CONSTP, = 30
gpu_avg_STATICP, = 4
gpu_tot_avg_power = 40
"""


def store_log(path, row: TracedKernel, cycles: int) -> int:
    """The log and power of a kernel whose launches take `cycles`, and the launch, each; returns their sum."""
    text = f"-gpgpu_n_mem {row.gpu_channels}\n-gpgpu_clock_domains {GPU.clock_mhz}:1:1:1\n"
    total_cycles = total_instructions = 0
    for number, (name, count) in enumerate(zip(row.launches, row.instructions), 1):
        total_cycles += LAUNCH_CYCLES + cycles
        total_instructions += count
        text += KERNEL.format(
            name=name,
            number=number,
            cycles=LAUNCH_CYCLES + cycles,
            instructions=count,
            total_cycles=total_cycles,
            total_instructions=total_instructions,
            reads=100 * number,
        )
    path.write_text(f"{text}GPGPU-Sim: *** exit detected ***\n")
    path.with_name(path.name.removesuffix(".log") + ".power").write_text(
        "".join(POWER.format(name=name) for name in row.launches)
    )
    return total_cycles


@pytest.fixture(scope="module")
def stored(tmp_path_factory):
    """Logs of the toy's kernels, and the cycles of each layer by memory channels; one log is missing."""
    folder = tmp_path_factory.mktemp("simulators")
    (folder / "logs").mkdir()
    summary = pimflow.trace("toy", folder / "traces", "accel-sim")
    cycles = {}
    for number, row in enumerate(summary.kernels):
        if row.layers == ("down.conv",) and row.gpu_channels == 16:
            continue
        log = folder / "logs" / f"{row.kernel}.{row.gpu_channels}.log"
        total = store_log(log, row, 20_000 + 700 * number)
        cycles |= {(layer, row.gpu_channels): total for layer in row.layers}
    ramulator = folder / "ramulator"
    ramulator.write_text(RAMULATOR)
    ramulator.chmod(0o755)
    return folder, cycles


@pytest.mark.long
def test_one_command_takes_the_gpu_from_logs_and_pim_from_a_simulator(stored, tmp_path, capsys):
    folder, cycles = stored
    options = ["--profiler", f"gpu=accel-sim-logs:{folder / 'logs'}"]
    options += ["--profiler", f"pim=ramulator:{folder / 'ramulator'}", "--quiet"]
    options += ["--cache", str(tmp_path / "cache")]
    out = tmp_path / "net"
    assert main(["compile", "toy", "-o", str(out), "--emit-traces", *options, "--conventions", "none"]) == 0
    text, report = capsys.readouterr().out, json.loads((out / "report.json").read_text())
    assert report["gpu_profiler"].startswith("accel-sim-logs:")
    assert report["timing"] == "ramulator:ramulator"
    assert report["gpu_known"]["simulated"] == 13 and report["gpu_known"]["scaled"] > 0
    assert "13 kernels simulated, " in text and " kernels scaled)" in text
    all_channel_cycles = [count for (_, channels), count in cycles.items() if channels == 32]
    assert report["latency_gpu_only_ns"] == pytest.approx(
        sum(all_channel_cycles) / GPU.clock_mhz * 1e3, rel=1e-4
    )
    energies_pj, gpu_ns = report["energies_gpu_only_pj"], sum(all_channel_cycles) / GPU.clock_mhz * 1e3
    for part, watts in (("gpu_leakage", 4), ("gpu_arithmetic", 6), ("gpu_dram", 0), ("gpu_l2", 0)):
        assert energies_pj[part] == pytest.approx(watts * gpu_ns * 1e3)
    assert report["verified"]
    assert (report["timing_violations"], report["timing_violations_of"]) == (0, "strict")
    assert (
        "0 timing violations in the clocks of strict, which the times are not from: ramulator:ramulator says "
        "no clocks"
    ) in text
    modes = {region["name"]: region["mode"] for region in report["regions"]}
    on_pim = next(name for name, mode in modes.items() if mode == "PIM")

    for name in ("down.conv", "pool", on_pim):
        candidates = {
            c["name"]: c for c in run_json(capsys, "compile toy --explain", name, *options)["candidates"]
        }
        (task,) = candidates["GPU"]["tasks"]
        if name == "down.conv":
            assert task["known"] == "scaled"
        else:
            assert task["known"] == "simulated"
            taken_ns = task["launch_ns"] + task["execution_ns"]
            assert taken_ns == pytest.approx(cycles[name, 16] / GPU.clock_mhz * 1e3, rel=1e-4)
        if name == on_pim:
            traces = (out / "traces" / name).glob("*.pim")
            clock = 3 * max(path.read_bytes().count(b"\n") for path in traces) + 1
            (task,) = [task for task in candidates["PIM"]["tasks"] if task["resource"] == "pim"]
            assert task["execution_ns"] == pytest.approx(clock * PIM.tCK_ns)


@pytest.mark.long
def test_profiling_with_both_keeps_what_they_said(stored, tmp_path, capsys):
    folder, _ = stored
    command = ["profile", "toy", "--cache", str(tmp_path / "cache"), "--json", "--quiet", "--jobs", "1"]
    command += ["--profiler", f"gpu=accel-sim-logs:{folder / 'logs'}"]
    command += ["--profiler", f"pim=ramulator:{folder / 'ramulator'}"]
    reports = []
    for _ in range(2):
        assert main(command) == 0
        reports.append(json.loads(capsys.readouterr().out))
    first, second = reports
    assert first["known"] == second["known"] and first["known"]["simulated"] == 13
    for section in ("layers", "kernels"):
        assert second[section] == {"kept": first[section]["computed"], "computed": 0}
