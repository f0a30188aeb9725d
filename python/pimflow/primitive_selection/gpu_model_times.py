"""Times of a GPU's primitives by the GPU model, without a card."""

from __future__ import annotations

from collections.abc import Iterable
from math import prod

from pimflow.core.kernel import ConvGeometry, Kernel
from pimflow.hardware import GpuSpec
from pimflow.host.result_cache import sources_digest
from pimflow.primitive_selection.profile import ANALYTIC, Device, Move, Profile, applicable_primitives
from pimflow.primitives import Primitive
from pimflow.primitives.launches import launches
from pimflow.primitives.layer import FP32_BYTES
from pimflow.simulators.gpu.model import kernel_cost

COMPUTED_BY = ("primitives", "core", "hardware", "simulators")


def model_device(gpu: GpuSpec) -> Device:
    """The device under whose name the model's times for `gpu` are stored."""
    return Device(cpu=ANALYTIC, model=gpu.name, threads=gpu.sms, unit="multiprocessors")


def analytic_profile(layers: Iterable[ConvGeometry], moves: Iterable[Move], gpu: GpuSpec) -> Profile:
    """Times of primitives for `layers`, and of layout transforms, in fp32 on all channels of `gpu`.

    The model covers primitives with tiles in shared memory, and the operator's own kernels, depthwise ones
    too. Other primitives have no time here: they have to be measured on a card.
    """
    times = {
        (primitive.name, layer): primitive_ns(primitive, layer, gpu)
        for layer in dict.fromkeys(layers)
        for primitive in applicable_primitives(layer, "cuda")
        if primitive.shared or primitive.family == "operator"
    }
    return Profile(
        device=model_device(gpu),
        code=sources_digest(COMPUTED_BY)[:16],
        times_ns=times,
        moves_ns={move: _move_ns(move, gpu) for move in moves},
    )


def primitive_ns(primitive: Primitive, layer: ConvGeometry, gpu: GpuSpec) -> float:
    """Sum of the times of a primitive's launches."""
    return sum(kernel_cost(kernel, gpu, dtype="fp32").total_ns for kernel in launches(primitive, layer))


def _move_ns(move: Move, gpu: GpuSpec) -> float:
    size = FP32_BYTES * prod(move[0])
    return kernel_cost(Kernel(kind="stream", input_bytes=size, output_bytes=size), gpu, dtype="fp32").total_ns
