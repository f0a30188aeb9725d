"""GPUs: the figures that the analytic model needs."""

from __future__ import annotations

import functools
import os
import re
from dataclasses import dataclass, field

from pimflow.core.blocks import BLOCK_SHARED_BYTES, MAX_THREADS, WARP_THREADS, KernelLimits
from pimflow.core.keywords import check_keywords
from pimflow.errors import SpecError, hint
from pimflow.hardware.reader import build, read_toml, require_not_negative, require_positive, spec_names
from pimflow.hardware.spec_text import html_table

# Energies that every GPU file has, and what each is charged for; in addition ``fma_<dtype>_pj`` for every
# dtype with a rate. `simulators.gpu.model.kernel_energy_pj` and the evaluator charge them.
ENERGY = {
    "static_w": "constant power, over the whole latency",
    "l2_pj_per_byte": "per byte between the SMs and the L2, or over the crossbar",
    "dram_pj_per_bit": "per bit of DRAM traffic",
}

# Prefixes of constants that times are divided by: shares of a peak, and rates. A suffix may name a class of
# kernels.
_DIVISORS = re.compile(r"channel_spread|depthwise|dram|gemv|l2(?!_re)|mma|sm_port|stream")
# Prefixes of constants that are exponents, with their minimum: 1 adds times, 64 takes about the longest.
_EXPONENTS = {"overlap": 1, "tile_power": 0}
_MAX_EXPONENT = 64
ASSUMED_STEP_NS = 613.0  # the H200's; loads from DRAM take most of it
DECODE_BITS = ("bits_4", "bits_8", "bits_16")


@check_keywords
@dataclass(frozen=True, kw_only=True)
class GpuSpec:
    """A GPU.

    Attributes
    ----------
    sms : int
        Streaming multiprocessors.
    clock_mhz : float
        Core clock, also that of the L2 and the crossbar.
    fma_per_sm_cycle : dict of str to float
        Fused multiply-adds per SM and core cycle, by dtype; tensor cores where the dtype has them.
    simd_fma_per_sm_cycle : dict of str to float
        The same without tensor cores, for depthwise and elementwise kernels.
    shared_memory_bytes, registers_bytes : int
        On-chip storage per SM, which bounds the resident thread blocks.
    memory_channels : int
        DRAM channels.
    channel_bytes_per_ns : float
        Peak bandwidth of one channel (1 byte/ns = 1 GB/s).
    l2_bytes_per_channel_cycle : float
        L2 bandwidth per channel and core cycle.
    write_factor : float
        DRAM bytes per byte written: 2 where the L2 is write-through with write-allocate.
    efficiency : dict of str to float
        Fitted constants of the analytic model, by name; see `simulators.gpu.roofline`.
    energy : dict of str to float
        The energies of `ENERGY`, and ``fma_<dtype>_pj`` per multiply-accumulate.
    max_block_threads : int
        Threads of a block, at most; a warp or more. Kernels of a GPU with fewer than CUDA allows have smaller
        blocks.
    product_step_ns : float
        Latency of a step of the loop of a product that pimflow compiles for tensor cores: loads, barriers.
        Tiles are chosen by it.
    decode_bandwidth_share : dict of str to float
        By ``bits_16``, ``bits_8`` or ``bits_4`` of a weight, the share of the peak bandwidth at which the
        best published kernels read weights that one token is multiplied with. No cost depends on it: it is
        a second baseline of language models.
    cuda_names : tuple of str
        The driver's names for such cards: ``gpu=cuda`` measures only on these.
    """

    name: str
    description: str
    sms: int
    clock_mhz: float
    fma_per_sm_cycle: dict[str, float]
    simd_fma_per_sm_cycle: dict[str, float]
    shared_memory_bytes: int
    registers_bytes: int
    memory_channels: int
    channel_bytes_per_ns: float
    l2_bytes_per_channel: int
    l2_bytes_per_channel_cycle: float
    write_factor: float
    launch_ns: float
    efficiency: dict[str, float]
    energy: dict[str, float]
    # Not in `repr`: no cost depends on them.
    max_block_threads: int = field(default=MAX_THREADS, repr=False)
    product_step_ns: float = field(default=ASSUMED_STEP_NS, repr=False)
    decode_bandwidth_share: dict[str, float] = field(default_factory=dict, repr=False)
    cuda_names: tuple[str, ...] = ()
    sources: dict[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        sizes = (
            *("sms", "clock_mhz", "memory_channels", "channel_bytes_per_ns", "l2_bytes_per_channel"),
            *("l2_bytes_per_channel_cycle", "write_factor", "shared_memory_bytes", "registers_bytes"),
        )
        require_positive(
            **{name: getattr(self, name) for name in sizes},
            **{f"fma_per_sm_cycle.{key}": value for key, value in self.fma_per_sm_cycle.items()},
            **{f"simd_fma_per_sm_cycle.{key}": value for key, value in self.simd_fma_per_sm_cycle.items()},
        )
        energies = {f"energy.{key}": value for key, value in self.energy.items()}
        constants = {f"efficiency.{key}": value for key, value in self.efficiency.items()}
        require_not_negative(launch_ns=self.launch_ns, **energies, **constants)
        require_positive(
            **{f"efficiency.{key}": c for key, c in self.efficiency.items() if _DIVISORS.match(key)}
        )
        require_positive(product_step_ns=self.product_step_ns)
        if not WARP_THREADS <= self.max_block_threads <= MAX_THREADS:
            raise ValueError(
                f"field 'max_block_threads': {self.max_block_threads} is not in {WARP_THREADS}..{MAX_THREADS}"
            )
        for key, value in self.decode_bandwidth_share.items():
            if key not in DECODE_BITS or not 0 < value <= 1:
                raise ValueError(
                    f"field 'decode_bandwidth_share.{key}': {value} is no share in (0, 1] of one of "
                    f"{', '.join(DECODE_BITS)}"
                )
        for key, value in self.efficiency.items():
            if key.startswith("split_limit") and value < 1:
                raise ValueError(f"field 'efficiency.{key}': {value} is not 1 or more")
        for key, value in self.efficiency.items():
            for name, minimum in _EXPONENTS.items():
                if key.startswith(name) and not minimum <= value <= _MAX_EXPONENT:
                    raise ValueError(
                        f"field 'efficiency.{key}': {value} is not in {minimum}..{_MAX_EXPONENT}"
                    )

    def __repr__(self) -> str:
        """One line; `spec_text.fields_text` has all fields."""
        return (
            f"GpuSpec({self.name}: {self.sms} multiprocessors at {self.clock_mhz:g} MHz, "
            f"{self.memory_channels} memory channels of {self.channel_bytes_per_ns:g} GB/s)"
        )

    def _repr_html_(self) -> str:
        """What a notebook shows: each field in a row."""
        return html_table(self)

    def has_tensor_cores(self, dtype: str) -> bool:
        """Whether it has tensor cores for `dtype`: only then is its rate above that of its SIMD lanes."""
        rate = self.fma_per_sm_cycle.get(dtype, 0.0)
        return rate > self.simd_fma_per_sm_cycle.get(dtype, rate)

    def kernel_limits(self, dtype: str) -> KernelLimits:
        """What schedules of kernels that store `dtype` must keep."""
        return KernelLimits(
            multiprocessors=self.sms,
            threads=self.max_block_threads,
            shared_bytes=min(BLOCK_SHARED_BYTES, self.shared_memory_bytes),
            multiprocessor_shared_bytes=self.shared_memory_bytes,
            register_bytes=self.registers_bytes,
            tensor_cores=self.has_tensor_cores(dtype),
            step_ns=self.product_step_ns,
            launch_ns=self.launch_ns,
            clock_mhz=self.clock_mhz,
        )

    @classmethod
    def load(cls, name_or_path: str | os.PathLike[str]) -> GpuSpec:
        """The embedded GPU of that name, or that of a TOML file."""
        text = os.fspath(name_or_path)
        return _load_embedded(text) if text in spec_names("gpu") else _read(text)


def _read(name_or_path: str) -> GpuSpec:
    stem, table = read_toml("gpu", name_or_path)
    gpu = build(GpuSpec, table, f"gpu '{stem}'", name=stem)
    needed = [*ENERGY, *(f"fma_{dtype}_pj" for dtype in gpu.fma_per_sm_cycle)]
    for key in sorted(gpu.energy.keys() - set(needed)):
        raise SpecError(f"gpu '{stem}': unknown field 'energy.{key}'; {hint(key, needed)}")
    for key in sorted(set(needed) - gpu.energy.keys()):
        raise SpecError(f"gpu '{stem}': missing field 'energy.{key}'")
    return gpu


_load_embedded = functools.cache(_read)  # files of the package do not change
