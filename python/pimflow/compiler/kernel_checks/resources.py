"""What the launches of GPU kernels need, and which limits of GPUs they break."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import tvm
from tvm import relax, tirx

from pimflow.compiler.kernel_checks.elf import CompiledKernel, compiled_kernels
from pimflow.compiler.kernel_checks.kernels import PlainKernels, ScheduledKernel
from pimflow.compiler.kernel_checks.launch import KernelLaunch, launch_extents, launch_statements, nodes
from pimflow.core.blocks import BLOCK_SHARED_BYTES
from pimflow.hardware import GpuSpec
from pimflow.pim_backend.runtime.cuda_binary import cubin, cuda_source
from pimflow.relay_passes.schedules import keep_registers
from pimflow.relay_passes.schedules.launch_limits import launch_problem

ARCHITECTURES = ("sm_75", "sm_86", "sm_90")
_REGISTER_BYTES = 4
_REGISTER_UNIT = 256  # registers that a warp gets at once (CUDA occupancy calculator, 5.0 to 12.x)
_WARP = 32


@dataclass(frozen=True, kw_only=True)
class LaunchResources:
    """A launch, and what its kernel needs on one architecture.

    Attributes
    ----------
    architecture : str
    kernel : CompiledKernel
    launch : KernelLaunch
    shared_bytes : int
        Shared memory of a block.
    """

    architecture: str
    kernel: CompiledKernel
    launch: KernelLaunch
    shared_bytes: int

    @property
    def register_bytes(self) -> int:
        """Registers of a block."""
        unit = _REGISTER_UNIT
        warp_registers = -(-self.kernel.registers * _WARP // unit) * unit
        return -(-self.launch.threads // _WARP) * warp_registers * _REGISTER_BYTES

    def resident_blocks(self, gpu: GpuSpec) -> int:
        """Blocks that shared memory and registers of a multiprocessor have room for."""
        by_shared = gpu.shared_memory_bytes // self.shared_bytes if self.shared_bytes else math.inf
        by_registers = gpu.registers_bytes // self.register_bytes if self.register_bytes else math.inf
        return int(min(by_shared, by_registers, 32))

    def problems(self, gpus: Sequence[GpuSpec]) -> list[str]:
        """Limits that the launch breaks, of CUDA and of each GPU."""
        problems = [launch_problem(dict(self.launch.extents))]
        if self.shared_bytes > BLOCK_SHARED_BYTES:
            problems.append(
                f"{self.shared_bytes} bytes of shared memory, and a block has {BLOCK_SHARED_BYTES}"
            )
        problems += [
            f"no block fits on a multiprocessor of {gpu.name}"
            for gpu in gpus
            if not self.resident_blocks(gpu)
        ]
        return [problem for problem in problems if problem]


def launch_resources(
    plain: PlainKernels, architectures: Sequence[str] = ARCHITECTURES
) -> list[LaunchResources]:
    """What all launches of kernels need, on each architecture.

    Raises
    ------
    UsageError
        If no CUDA compiler is found.
    """
    source = _source(plain)
    launches = {
        name: launch for kernel in plain.schedule() for name, launch in launches_by_name(kernel).items()
    }
    resources = []
    for architecture in architectures:
        for name, kernel in compiled_kernels(cubin(source, architecture)).items():
            if name not in launches:  # a function that kernels call, such as CUDA's division
                continue
            launch, shared_bytes = launches[name]
            resources.append(
                LaunchResources(
                    architecture=architecture,
                    kernel=kernel,
                    launch=launch,
                    shared_bytes=shared_bytes,
                )
            )
    return resources


def _source(plain: PlainKernels) -> str:
    named = relax.transform.AttachGlobalSymbol()(plain.scheduled_module())
    return cuda_source(lambda: tvm.compile(named, plain.target, tir_pipeline=keep_registers.PIPELINE))


def launches_by_name(kernel: ScheduledKernel) -> dict[str, tuple[KernelLaunch, int]]:
    """By name in CUDA, the launches of a kernel and their shared memory in bytes."""
    launches: dict[str, tuple[KernelLaunch, int]] = {}
    for index, stmt in enumerate(launch_statements(kernel.lowered.body)):
        buffers = [alloc.buffer for alloc in nodes(stmt, tirx.AllocBuffer)]
        shared_bytes = sum(
            math.prod(map(int, buffer.shape)) * np.dtype(str(buffer.dtype)).itemsize
            for buffer in buffers
            if buffer.scope().startswith("shared")
        )
        name = f"{kernel.name}_kernel_{index}" if index else f"{kernel.name}_kernel"
        launches[name] = KernelLaunch(extents=launch_extents(stmt)), shared_bytes
    return launches
