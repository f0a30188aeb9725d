"""Are primitives measured on other machines, under their names, and is it said where one is not there?"""

import json
import shutil
import socket
import tarfile
import time

import numpy as np
import pytest
import rpc_machines
import tvm
from command_line import run

from pimflow.commands.main import main
from pimflow.compiler.c_code import builds
from pimflow.core.kernel import ConvGeometry
from pimflow.errors import ProfilerError, UsageError
from pimflow.host.result_cache import ResultCache
from pimflow.pim_backend.runtime.targets import cpu_name, cpu_target
from pimflow.primitive_selection import measuring
from pimflow.primitive_selection.machines import Address, Machine, Remote, machine
from pimflow.primitive_selection.profile import Profile, measuring_order
from pimflow.primitives.filters import transform_filters
from pimflow.primitives.kernels.prim_func import kernel
from pimflow.relay_passes.schedules.schedule_cpu import ScheduleCpu

pytest.importorskip("tornado", reason="TVM's tracker")
LAYER = ConvGeometry(n=1, h=8, w=8, c=16, oc=16, kh=3, kw=3, padding=(1, 1, 1, 1))
MOVE = ((1, 8, 8, 16), "HWC", "CHW")


@pytest.fixture(scope="module")
def board():
    """A server that was started with a key."""
    with rpc_machines.server("board") as process:
        yield f"rpc:127.0.0.1:{process.port}/board"


def schedule(layer, target):
    """The kernel of its most promising primitive."""
    function = kernel(measuring_order(layer)[0], layer).with_attr("global_symbol", "main")
    with target:
        return ScheduleCpu()(tvm.IRModule({"main": function}))


def command(capsys, *arguments):
    return run(capsys, "select toy", *arguments)


def choices_of(row):
    return [(choice["layer"], choice["primitive"]) for choice in row["choices"]]


@pytest.mark.long
def test_times_are_kept_under_the_name_of_the_machine(board, tmp_path, monkeypatch):
    cache = ResultCache(tmp_path / "cache.sqlite")
    with machine(board) as there:
        profile = measuring.Measurer(cache, machine=there).measure([LAYER], [MOVE], 2)
        assert len(profile.times_ns) == 2 and not profile.failed
        assert all(ns > 0 for ns in (*profile.times_ns.values(), profile.moves_ns[MOVE]))
        assert profile.device.model == "remote board" and profile.device.cpu.endswith(cpu_name())
        monkeypatch.setattr(measuring, "primitive_ns", lambda *_: 7.0)
        monkeypatch.setattr(measuring, "small_ns", lambda keys, _: [9.0] * len(keys))
        assert measuring.Measurer(cache, machine=there).measure([LAYER], [MOVE], 2) == profile
    here = measuring.Measurer(cache).measure([LAYER], [MOVE], 2)
    assert set(here.times_ns.values()) == {7.0} and set(here.moves_ns.values()) == {9.0}
    assert here.device == Machine().device != profile.device


@pytest.mark.long
def test_the_command_measures_there_and_refuses_the_profile_here(board, tmp_path, capsys):
    path, cache = tmp_path / "board.json", ("--cache", tmp_path / "cache.sqlite")
    argv = ("--device", board, "--measure", 1, "-o", path, *cache, "--json", "--quiet")
    code, out, err = command(capsys, *argv)
    assert (code, err) == (0, "")
    row, profile = json.loads(out), Profile.read(path)
    assert row["device"] == profile.device.name and "remote board" in row["device"]
    assert row["measured"]["primitives"] == len(profile.times_ns) > 0
    code, out, err = command(capsys, "--profile", path, *cache)
    assert (code, out) == (3, "") and "remote board" in err and err.count("\n") == 1
    for named in (board, row["device"]):
        code, out, err = command(capsys, "--profile", path, "--device", named, *cache, "--json")
        assert (code, err) == (0, "")
        repeated = json.loads(out)
        assert repeated["device"] == row["device"] and choices_of(repeated) == choices_of(row)


@pytest.mark.long
@pytest.mark.skipif(not builds.local_compiler(), reason="needs a C compiler")
@pytest.mark.parametrize("here", [True, False])
def test_c_is_measured_there(board, monkeypatch, here):
    """Built by a compiler of this machine, or sent as a source that the other machine's compiler builds."""
    if not here:
        monkeypatch.setattr(builds, "compiler_for", lambda *_: None)
        monkeypatch.setattr(builds, "optimisation_pragmas", lambda _: '#pragma GCC optimize("O3")\n')
    with machine(board, "c") as there:
        compiler = builds.require_compiler().version if here else "its own compiler"
        assert there.device.cpu.startswith(f"C by {compiler} for ") and there.device.cpu.endswith(cpu_name())
        assert (there.device.model, there.device.threads) == ("remote board", 1)
        built = there.build(schedule(LAYER, there.target))
        values = np.random.default_rng(0)
        x, w = (values.standard_normal(s).astype("float32") for s in ((1, 8, 8, 16), (16, 16, 3, 3)))
        y = tvm.runtime.tensor(np.zeros((1, 8, 8, 16), np.float32), there.cpu)
        filters = transform_filters(measuring_order(LAYER)[0], LAYER, w)
        built["main"](*(tvm.runtime.tensor(operand, there.cpu) for operand in (x, filters)), y)
        padded = np.pad(x[0].astype(np.float64), ((1, 1), (1, 1), (0, 0)))
        windows = np.lib.stride_tricks.sliding_window_view(padded, (3, 3), (0, 1))
        expected = np.einsum("hwcij,ocij->hwo", windows, w.astype(np.float64))
        assert np.abs(y.numpy()[0] - expected).max() <= 1e-4 * np.abs(expected).max()
        profile = measuring.Measurer(machine=there).measure([LAYER], [MOVE], 1)
        assert not profile.failed and min(*profile.times_ns.values(), *profile.moves_ns.values()) > 0


@pytest.mark.long
@pytest.mark.skipif(not builds.local_compiler(), reason="needs a C compiler")
def test_c_that_nobody_builds(board, monkeypatch, capsys):
    monkeypatch.setenv("CC", shutil.which("false"))
    code, out, err = command(capsys, "--device", board, "--target", "c", "--cache", "none")
    assert (code, out) == (3, "") and f"{board}: no compiler builds C for" in err and err.count("\n") == 1
    monkeypatch.setattr(builds, "compiler_for", lambda *_: None)
    monkeypatch.setattr(builds, "optimisation_pragmas", lambda _: "#error no such processor\n")
    code, out, err = command(capsys, "--device", board, "--target", "c", "--cache", "none")
    assert (code, out) == (3, "") and "no such processor" in err and err.count("\n") == 1


def test_compilers_of_other_machines(monkeypatch):
    there = {"aarch64-linux-gnu-gcc", "arm-none-eabi-gcc"}
    monkeypatch.setattr(builds.shutil, "which", lambda name: name if name in there else None)
    for triple in ("aarch64-linux-gnu", "aarch64-unknown-linux-gnu"):
        compiler = builds.compiler_for(triple, "cortex-a72")
        assert compiler == builds.Compiler(("aarch64-linux-gnu-gcc",), ("-O3", "-mcpu=cortex-a72"))
    assert builds.compiler_for("riscv64-unknown-linux-gnu", "") is None
    monkeypatch.setattr(builds.platform, "machine", lambda: "x86_64")
    monkeypatch.setattr(builds.shutil, "which", lambda name: name)
    native = builds.compiler_for("x86_64-pc-linux-gnu", "znver2")
    assert native.options in (("-O3", "-march=znver2"), builds.OPTIONS)
    assert builds.compiler_for("x86_64-pc-linux-gnu", cpu_name()).options == builds.OPTIONS


def test_what_begins_a_source_without_options():
    begin = builds.optimisation_pragmas(cpu_target("llvm -mtriple=x86_64-linux-gnu -mcpu=znver4"))
    assert 'target("arch=znver4")' in begin and "PIMFLOW_LANES 16" in begin
    begin = builds.optimisation_pragmas(cpu_target("llvm -mtriple=x86_64-linux-gnu -mcpu=haswell"))
    assert "PIMFLOW_LANES 8" in begin
    begin = builds.optimisation_pragmas(cpu_target("llvm -mtriple=aarch64-linux-gnu -mcpu=cortex-a72"))
    assert 'target("cpu=cortex-a72")' in begin and "PIMFLOW_LANES 4" in begin


@pytest.fixture(scope="module")
def tracked():
    """A tracker with one machine, 'pi', which has said that it is there."""
    with rpc_machines.server("pi", tracked=True) as process:
        address = f"rpc:127.0.0.1:{process.port}"
        deadline = time.monotonic() + 60
        while main(["select", "toy", "--device", f"{address}/pie"]) != 2 and time.monotonic() < deadline:
            time.sleep(0.2)
        yield process, address


@pytest.mark.long
def test_a_tracker_gives_a_machine_by_its_name(tracked, capsys):
    _, address = tracked
    code, out, err = command(capsys, "--device", f"{address}/pie")
    assert (code, out) == (2, "") and "unknown machine of the tracker" in err and "did you mean pi?" in err
    code, out, err = command(capsys, "--device", address)
    assert (code, out) == (2, "")
    assert f"{address} is a tracker: name one of its machines, such as {address}/pi" in err
    there = Remote(Address.parse(f"{address}/pi"))
    assert there.device.model == "remote pi"
    with pytest.raises(ProfilerError, match=f"{address}/pi: all machines of that name are in use"):
        Remote(Address.parse(f"{address}/pi"))


@pytest.mark.long
def test_a_machine_that_goes_away(tmp_path, capsys):
    cache, path = tmp_path / "cache.sqlite", tmp_path / "p.json"
    with rpc_machines.server("") as process:
        address = f"rpc:127.0.0.1:{process.port}"
        results = ResultCache(cache)
        with (
            machine(address) as there,
            pytest.raises(ProfilerError, match=f"{address}: the connection was lost"),
        ):
            measuring.Measurer(results, lambda _: process.kill(), machine=there).measure([LAYER], [MOVE], 3)
    # What was measured stays, whole.
    measurements = measuring.Measurements(results, measuring.code_digest(), there.device)
    keys = [(p.name, LAYER) for p in measuring_order(LAYER)[:3]]
    times = measurements.get(keys)
    assert list(times) == keys[:1] and min(times.values()) > 0
    code, out, err = command(capsys, "--device", address, "-o", path, "--cache", "none")
    assert (code, out) == (3, "") and f"{address}: Connection refused" in err and err.count("\n") == 1
    assert not path.exists()


@pytest.mark.long
def test_another_key(board, capsys):
    code, out, err = command(capsys, "--device", f"{board}2")
    assert (code, out) == (3, "") and "another key than board2" in err and err.count("\n") == 1
    code, out, err = command(capsys, "--device", board.partition("/")[0] + "/")
    assert (code, out) == (2, "") and "is no machine: give rpc:HOST:PORT" in err


def test_what_answers_otherwise(monkeypatch):
    monkeypatch.setattr("pimflow.primitive_selection.machines.ANSWER_SECONDS", 0.2)
    with socket.create_server(("127.0.0.1", 0)) as listening:
        address = f"rpc:127.0.0.1:{listening.getsockname()[1]}"
        with pytest.raises(ProfilerError, match=f"{address}: no TVM RPC server or tracker answers within"):
            Remote(Address.parse(address))


@pytest.mark.long
@pytest.mark.parametrize(
    "options, said",
    [
        (["--device", "rpc:here"], "is no machine"),
        (["--device", "rpc:here:port"], "is no machine"),
        (["--device", "rpc:here:0"], "is no machine"),
        (["--device", "rpc::90"], "is no machine"),
        (["--target", "llvm"], "give --device rpc:HOST:PORT/KEY too"),
        (["--target", "c -mtriple=aarch64-linux-gnu"], "give --device rpc:HOST:PORT/KEY too"),
        (["--target", "c -mcpus=a", "--device", "rpc:here:90"], "is none of -mtriple"),
    ],
)  # fmt: skip
def test_wrong_machines(capsys, options, said):
    code, out, err = command(capsys, *options, "--cache", "none")
    assert (code, out) == (2, "") and said in err and err.count("\n") == 1


@pytest.mark.parametrize(
    "text, said",
    [
        ("cuda", "is not a CPU"),
        ("", "is not a CPU"),
        ("c -mcpu=znver4", "is not a CPU"),
        ("llvm -mcpus=znver4", "is none of -mtriple"),
        ("llvm mcpu=znver4", "is none of -mtriple"),
        ("llvm -mcpu=", "is none of -mtriple"),
        ("llvm -mtriple=aarch46-linux-gnu", "unknown architecture 'aarch46'; did you mean aarch64"),
        ("llvm -mtriple=aarch64-linux-gnu -mcpu=cortex-a7x2", "unknown CPU of 'aarch64'.*cortex-a72"),
    ],
)
def test_targets_that_are_none(text, said):
    with pytest.raises(UsageError, match=said):
        cpu_target(text)


@pytest.mark.parametrize(
    "text, machine_number",
    [
        pytest.param("llvm -mtriple=aarch64-linux-gnu -mcpu=cortex-a72", 183, marks=pytest.mark.long),
        ("llvm -mtriple=armv7a-linux-gnueabihf", 40),
    ],
)
def test_code_is_made_for_other_architectures(text, machine_number, tmp_path):
    """ELF says for which: e_machine, in the header's bytes 18 and 19."""
    target = cpu_target(text)
    tvm.compile(schedule(LAYER, target), target).export_library(str(tmp_path / "p.tar"))
    with tarfile.open(tmp_path / "p.tar") as tar:
        (member,) = [m for m in tar.getmembers() if m.name.endswith(".o")]
        header = tar.extractfile(member).read(20)
    assert header[:4] == b"\x7fELF" and int.from_bytes(header[18:20], "little") == machine_number
