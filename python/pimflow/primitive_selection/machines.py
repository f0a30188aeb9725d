"""Machines on which primitives are measured: this one, and others through TVM's RPC."""

from __future__ import annotations

import contextlib
import platform
import shutil
import socket
import struct
import tarfile
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import tvm
from tvm import rpc
from tvm.rpc import base

from pimflow.compiler.c_code import builds, kernels
from pimflow.core.blocks import KernelLimits
from pimflow.errors import ProfilerError, UnknownNameError, UsageError
from pimflow.pim_backend.runtime.cuda_binary import compile_kernels, cuda_compiler
from pimflow.pim_backend.runtime.targets import cpu_name, cpu_target, local_cuda
from pimflow.primitive_selection.options import CUDA
from pimflow.primitive_selection.profile import Device
from pimflow.relay_passes.schedules import keep_registers
from pimflow.relay_passes.schedules.schedule_cpu import ScheduleCpu
from pimflow.relay_passes.schedules.schedule_gpu import ScheduleGpu

keep_registers.register()

SCHEME = "rpc:"
ADDRESS_FORM = (
    "rpc:HOST:PORT of a server, rpc:HOST:PORT/KEY of a machine that a tracker or a server calls KEY"
)
ANSWER_SECONDS = 10.0  # a machine that measures for another client answers only after that
LIBRARY = "primitives"


class Machine:
    """This machine; `Remote` is another one, `Card` its GPU.

    Parameters
    ----------
    target : Target, optional
        LLVM for this CPU by default; or C, built by this machine's compiler.

    Raises
    ------
    ArtifactError
        If C is requested and there is no compiler.

    Attributes
    ----------
    device : Device
        Name under which its times are stored.
    """

    def __init__(self, target: tvm.target.Target | None = None):
        self.target = target or tvm.target.Target({"kind": "llvm", "mcpu": cpu_name()})
        compiler_prefix = f"C by {builds.require_compiler().version} for " if self.has_c_kernels else ""
        threads = 1 if self.has_c_kernels else thread_count()
        self.device = Device(cpu=compiler_prefix + cpu_name(), model=_model_name(), threads=threads)

    @property
    def has_c_kernels(self) -> bool:
        """Whether kernels are C, on one core."""
        return self.target.kind.name == "c"

    @property
    def cpu(self) -> tvm.runtime.Device:
        """The device on which the tensors are."""
        return tvm.cpu()

    @property
    def schedule(self) -> tvm.transform.Pass:
        """The schedule rules for kernels."""
        return ScheduleCpu()

    def build(self, scheduled: tvm.IRModule) -> tvm.runtime.Module:
        """Compile scheduled kernels; the module calls them by their names.

        Raises
        ------
        ArtifactError
            If the C compiler fails.
        """
        if self.has_c_kernels:
            return builds.load_module(self._source(scheduled))
        return self._compile(scheduled).jit()

    def _compile(self, scheduled: tvm.IRModule) -> tvm.runtime.Executable:
        return tvm.compile(scheduled, self.target, tir_pipeline=keep_registers.PIPELINE)

    def _source(self, scheduled: tvm.IRModule) -> str:
        return kernels.callable_source({gv.name_hint: f for gv, f in scheduled.functions_items()})

    def require_answer(self) -> None:
        """Raise `ProfilerError` if the machine does not answer any more."""


class Card(Machine):
    """The first CUDA device of this machine.

    Raises
    ------
    ProfilerError
        If there is none, or no compiler for it.
    """

    def __init__(self):
        target = local_cuda()
        if target is None or not cuda_compiler():
            raise ProfilerError(
                "--device cuda: there is no CUDA device here, or no compiler for it; name --gpu"
            )
        self.target, card = target, tvm.cuda()
        self.device = Device(
            cpu=str(target.attrs["arch"]),
            model=str(card.device_name),
            threads=int(card.multi_processor_count),
            unit="multiprocessors",
        )

    @property
    def cpu(self) -> tvm.runtime.Device:
        return tvm.cuda()

    @property
    def schedule(self) -> tvm.transform.Pass:
        return ScheduleGpu(KernelLimits(multiprocessors=self.device.threads))

    def build(self, scheduled: tvm.IRModule) -> tvm.runtime.Module:
        """Compile scheduled kernels for the GPU; raises `ProfilerError` if there is no binary."""
        built, kernels = compile_kernels(
            lambda: tvm.compile(scheduled, self.target, tir_pipeline="s_tir"), self.target
        )
        if kernels.problem:
            raise ProfilerError(kernels.problem)
        return built.mod


class Remote(Machine):
    """Another machine, through a session of TVM's RPC.

    Parameters
    ----------
    target : str
        Target of its code; if empty, the machine's own description of itself. ``c``, alone or with options as
        for ``llvm``, is C.

    Raises
    ------
    ProfilerError
        If it is not there, does not answer, has another key, or no compiler builds C for it.
    UnknownNameError
        If the tracker has no machine of that name.
    UsageError
        If the machine cannot describe itself, and `target` is empty.
    """

    def __init__(self, address: Address, target: str = ""):
        self.address = address
        kind = target.partition(" ")[0]
        explicit_target = (
            cpu_target(target.replace("c", "llvm", 1) if kind == "c" else target) if target else None
        )
        self._session = _session(address)
        self._loaded = 0
        self._machine = self._own_target() if explicit_target is None or target == "c" else explicit_target
        self.target = tvm.target.Target("c") if kind == "c" else self._machine
        threads = 1 if self.has_c_kernels else int(self._call("runtime.NumThreads"))
        compiler_prefix = self._c_compiler() if self.has_c_kernels else ""
        self.device = Device(
            cpu=f"{compiler_prefix}{_target_text(self._machine)}", model=address.name, threads=threads
        )

    @property
    def cpu(self) -> tvm.runtime.Device:
        return self._session.cpu()

    def build(self, scheduled: tvm.IRModule) -> tvm.runtime.Module:
        """Compile here if there is a compiler for the machine; else the machine's own compiler links."""
        self._loaded += 1
        if self.has_c_kernels:
            return self._build_c(self._source(scheduled))
        linker = _linker(str(self._machine.attrs.get("mtriple", "")))
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / f"{LIBRARY}{self._loaded}.{'so' if linker else 'tar'}"
            self._compile(scheduled).export_library(str(path), **({"cc": linker} if linker else {}))
            return self._upload(path)

    def _upload(self, path: Path) -> tvm.runtime.Module:
        self._session.upload(str(path))
        return self._session.load_module(path.name)

    def _c_compiler(self) -> str:
        """Prefix of the device's name that names the C compiler; raises `ProfilerError` without one."""
        triple, cpu = (str(self._machine.attrs.get(name, "")) for name in ("mtriple", "mcpu"))
        self._compiler = builds.compiler_for(triple, cpu)
        try:
            self._build_c("int pimflow_probe(void) { return 0; }\n")
        except Exception as error:  # any error of a compiler, here or there, or of the connection
            self.require_answer()
            lines = str(error).strip().splitlines() or ["no reason given"]
            reason = next((line for line in lines if "error: " in line), lines[-1]).strip()
            raise ProfilerError(
                f"{self.address.text}: no compiler builds C for '{_target_text(self._machine)}' ({reason}); "
                "install one here (TRIPLE-gcc) or there, and name a CPU that it knows: "
                "--target 'c -mtriple=… -mcpu=…'"
            ) from error
        return f"C by {self._compiler.version if self._compiler else 'its own compiler'} for "

    def _build_c(self, code: str) -> tvm.runtime.Module:
        with tempfile.TemporaryDirectory() as folder:
            if self._compiler:
                path = Path(folder) / f"{LIBRARY}{self._loaded}.so"
                self._compiler.build_library(code, path)
                return self._upload(path)
            source = Path(folder) / f"{LIBRARY}.c"
            source.write_text(builds.optimisation_pragmas(self._machine) + code)
            path = Path(folder) / f"{LIBRARY}{self._loaded}.tar"
            with tarfile.open(path, "w") as tar:
                tar.add(source, source.name)
            return self._upload(path)

    def require_answer(self) -> None:
        try:
            self._call("runtime.NumThreads")
        except Exception as error:  # a broken connection may raise anything
            raise ProfilerError(
                f"{self.address.text}: the connection was lost: the machine is gone, or cannot run code for "
                f"'{_target_text(self.target)}' (--target)"
            ) from error

    def close(self) -> None:
        """End the session, so that others can use the machine."""
        with contextlib.suppress(Exception):  # the machine may be gone
            self._call("CloseRPCConnection")

    def _call(self, function: str) -> object:
        return self._session.get_function(function)()

    def _own_target(self) -> tvm.target.Target:
        """The target as the machine's own LLVM describes it; raises `UsageError` without LLVM there."""
        names = ("target.llvm_get_system_triple", "target.llvm_get_system_cpu")
        try:
            triple, cpu = (str(self._call(name)) for name in names)
        except Exception as error:  # a runtime without LLVM
            raise UsageError(
                f"{self.address.text} has no LLVM, which would name its CPU; name it with --target, such as "
                "'llvm -mtriple=aarch64-linux-gnu -mcpu=cortex-a72'"
            ) from error
        return cpu_target(f"llvm -mtriple={triple} -mcpu={cpu}")


@dataclass(frozen=True)
class Address:
    """Address of a remote machine.

    Attributes
    ----------
    key : str
        Name of the machine; empty for a server without a name.
    """

    host: str
    port: int
    key: str = ""

    @classmethod
    def parse(cls, text: str) -> Address:
        """Read ``rpc:HOST:PORT/KEY`` or ``rpc:HOST:PORT``; raises `UsageError` for anything else."""
        place, slash, key = text.removeprefix(SCHEME).partition("/")
        host, _, port = place.rpartition(":")
        is_valid = text.startswith(SCHEME) and host and port.isascii() and port.isdigit()
        if not is_valid or not 0 < int(port) < 1 << 16 or (slash and not key) or len(key.split()) > 1:
            raise UsageError(f"--device '{text}' is no machine: give {ADDRESS_FORM}")
        return cls(host, int(port), key)

    @property
    def text(self) -> str:
        """The address as `parse` reads it."""
        return f"{SCHEME}{self.host}:{self.port}" + (f"/{self.key}" if self.key else "")

    @property
    def name(self) -> str:
        """Name of the device in its profile: the key, since a tracker can give the machine another port."""
        return f"remote {self.key or f'{self.host}:{self.port}'}"


def is_remote(device: str | None) -> bool:
    """Whether `device` is an address, not the name of a profile's machine."""
    return device is not None and device.startswith(SCHEME)


@contextlib.contextmanager
def machine(device: str | None, target: str = "") -> Iterator[Machine]:
    """Context manager: the machine at an address, or the GPU of this one; this machine for anything else."""
    if device == CUDA:
        yield Card()
    elif is_remote(device):
        remote = Remote(Address.parse(device), target)
        try:
            yield remote
        finally:
            remote.close()
    else:
        yield Machine(cpu_target(target) if target else None)


def thread_count() -> int:
    """Number of threads that TVM's runtime uses on this machine."""
    return int(tvm.get_global_func("runtime.NumThreads")())


def _model_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    model_names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(model_names, "") or platform.processor() or platform.machine()


def _target_text(target: tvm.target.Target) -> str:
    """A target's attributes as text, which tell it from other targets; its kind if it has none."""
    parts = [target.attrs.get(name) for name in ("mtriple", "mcpu", "mattr", "mabi", "mfloat-abi")]
    texts = [part if isinstance(part, str) else ",".join(map(str, part)) for part in parts if part]
    return " ".join(texts) or target.kind.name


def _linker(triple: str) -> str | None:
    """A compiler on this machine that links for `triple`; None if there is none."""
    if triple.partition("-")[0] in ("", platform.machine()):
        return shutil.which("c++") or shutil.which("g++") or shutil.which("cc")
    names = [f"{name}-{cc}" for name in builds.gcc_names(triple) for cc in ("g++", "gcc")]
    return next(filter(None, map(shutil.which, names)), None)


def _session(address: Address) -> rpc.RPCSession:
    try:
        if not _is_tracker(address):
            return rpc.connect(address.host, address.port, address.key)
        tracker = rpc.connect_tracker(address.host, address.port)
        _require_free_machine(address, tracker.summary())
        return tracker.request(address.key, max_retry=1)
    except OSError as error:
        raise ProfilerError(f"{address.text}: {error.strerror or error}") from error
    except RuntimeError as error:
        if "matches key" in str(error):
            key = address.key or "none"
            raise ProfilerError(
                f"{address.text}: the server was started with another key than {key}; give it as "
                f"{ADDRESS_FORM}"
            ) from error
        reason = (str(error).strip().splitlines() or ["no reason given"])[-1]
        raise ProfilerError(f"{address.text}: no session: {reason}") from error


def _is_tracker(address: Address) -> bool:
    """Whether the address is a tracker's: a server closes the connection after a tracker's greeting."""
    no_answer = (
        f"{address.text}: no TVM RPC server or tracker answers within {ANSWER_SECONDS:g} s; is it busy?"
    )
    try:
        with socket.create_connection((address.host, address.port), ANSWER_SECONDS) as connection:
            connection.sendall(struct.pack("<i", base.RPC_TRACKER_MAGIC))
            answer = connection.recv(4)
    except TimeoutError as error:
        raise ProfilerError(no_answer) from error
    except ConnectionResetError:
        return False
    if answer and answer != struct.pack("<i", base.RPC_TRACKER_MAGIC):
        raise ProfilerError(f"{address.text}: what answers is no TVM RPC server or tracker")
    return bool(answer)


def _require_free_machine(address: Address, summary: dict) -> None:
    """Raise an error unless the tracker has a free machine of that name: a request would wait for one."""
    keys = {str(server["key"]).removeprefix("server:") for server in summary["server_info"]}
    if not keys:
        raise ProfilerError(f"{address.text}: the tracker has no machines")
    if not address.key:
        raise UsageError(
            f"{address.text} is a tracker: name one of its machines, such as {address.text}/{min(keys)}"
        )
    queues = {name: queue["free"] for name, queue in summary["queue_info"].items()}
    if address.key not in keys:
        raise UnknownNameError(f"machine of the tracker at {address.host}:{address.port}", address.key, keys)
    if not queues.get(address.key):
        raise ProfilerError(f"{address.text}: all machines of that name are in use; try again later")
