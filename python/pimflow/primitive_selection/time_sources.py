"""The times that a selection of primitives goes by: measured on a machine, predicted, or of a file."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from pimflow.core.region import ConvGeometry
from pimflow.errors import UsageError
from pimflow.hardware import GpuSpec, system
from pimflow.primitive_selection.layers import Layers
from pimflow.primitive_selection.problem import Selected
from pimflow.primitive_selection.profile import Profile

if TYPE_CHECKING:
    from pimflow.host.result_cache import ResultCache
    from pimflow.primitive_selection.machines import Machine

CUDA = "cuda"  # of --device
MEASURE = 12  # primitives of a layer that are measured unless more are asked for
MODES = ("measured", "predicted", "mixed")
Progress = Callable[[float], None]


@dataclass(frozen=True, kw_only=True)
class Source:
    """Where times come from; see `api.select.select_for`.

    Attributes
    ----------
    profile : Profile, str or path
        One of `MODES`, or given.
    device : str or None
        A remote machine, ``cuda`` for a GPU, or the one that a given profile is of.
    target : str
        What code is made for: a remote machine's, empty for what it says of itself; or ``c``, here.
    gpu : str, path or GpuSpec, optional
        The GPU that is modelled; the default system's if none.
    """

    profile: Profile | str | os.PathLike
    device: str | None
    target: str
    measure: int | None
    cache: ResultCache | None
    gpu: str | os.PathLike | GpuSpec | None = None

    @property
    def on_gpu(self) -> bool:
        return self.device == CUDA

    @property
    def measures_gpu(self) -> bool:
        """Whether there is a card to measure, and no other GPU is asked for."""
        from pimflow.pim_backend.runtime.targets import local_cuda

        return self.on_gpu and not self.gpu and local_cuda() is not None

    @contextlib.contextmanager
    def times(self, layers: Layers, progress: Progress) -> Iterator[Times]:
        """The times of `layers`; more can be measured until the block ends."""
        # Imports TVM, so not at the top of the file.
        from pimflow.primitive_selection.machines import is_remote, machine

        if self.target not in ("", "c") and not is_remote(self.device):
            raise UsageError(
                "--target: this machine's times are of code for itself, or of C (--target c); for another's "
                "give --device rpc:HOST:PORT/KEY too"
            )
        if self.gpu and not self.on_gpu:
            raise UsageError("--gpu says which GPU is modelled: give --device cuda too")
        if self.on_gpu and not self.measures_gpu:
            yield Times(self, layers, None, progress)
            return
        if self.profile not in MODES and self.device and not is_remote(self.device):
            yield Times(self, layers, None, progress)
            return
        with machine(self.device, self.target) as opened:
            yield Times(self, layers, opened, progress)


class Times:
    """The times of a network's layers."""

    def __init__(self, source: Source, layers: Layers, machine: Machine | None, progress: Progress):
        self._source, self._layers, self._machine = source, layers, machine
        if source.on_gpu and source.profile in ("predicted", "mixed"):
            raise UsageError(
                f"--profile {source.profile}: times of a GPU are measured, modelled, or of a file"
            )
        if source.on_gpu and machine is None:
            self.profile = self._modelled()
            return
        self.profile = self._of_modes(progress) if source.profile in MODES else self._given()
        if source.profile in ("predicted", "mixed"):
            self.profile = self._predicted(self.profile)

    def _modelled(self) -> Profile:
        from pimflow.primitive_selection import gpu_model_times

        source, layers = self._source, self._layers
        gpu = source.gpu or system().gpu
        gpu = gpu if isinstance(gpu, GpuSpec) else GpuSpec.load(gpu)
        if source.profile == "measured":
            return gpu_model_times.analytic(layers.chosen.values(), layers.moves.values(), gpu)
        profile = source.profile if isinstance(source.profile, Profile) else Profile.read(source.profile)
        profile.require(gpu_model_times.device_of(gpu), None)
        return profile

    def _of_modes(self, progress: Progress) -> Profile:
        from pimflow.primitive_selection import measuring
        from pimflow.primitive_selection.machines import is_remote

        source, layers = self._source, self._layers
        most = 0 if source.profile == "predicted" else source.measure
        profile = measuring.measure(
            layers.chosen.values(),
            layers.moves.values(),
            most,
            source.cache,
            progress,
            machine=self._machine,
            pools=layers.pooled,
        )
        measured_now = is_remote(source.device) or source.on_gpu
        profile.require(self._machine.device, None if measured_now else source.device)
        return profile

    def _given(self) -> Profile:
        given = self._source.profile
        profile = given if isinstance(given, Profile) else Profile.read(given)
        machine = self._machine
        profile.require(machine and machine.device, None if machine else self._source.device)
        return profile

    def _predicted(self, profile: Profile) -> Profile:
        from pimflow.primitive_selection.prediction import predicted_ns

        return replace(profile, predicted_ns=predicted_ns(profile, self._layers.chosen.values()))

    def refine(self, selected: Selected) -> bool:
        """Measure what was selected by a predicted time, if such is to be; False if there is nothing."""
        guessing = self._source.profile == "mixed" and not self._source.on_gpu
        keys = self._guessed(selected) if guessing else []
        if keys:
            from pimflow.primitive_selection import measuring

            more = measuring.measure([], [], 0, self._source.cache, named=keys, machine=self._machine)
            times, failed = self.profile.times_ns | more.times_ns, self.profile.failed | more.failed
            self.profile = self._predicted(replace(self.profile, times_ns=times, failed=failed))
        return bool(keys)

    def _guessed(self, selected: Selected) -> list[tuple[str, ConvGeometry]]:
        chosen = {
            (candidate.rewrite.primitive, self._layers.chosen[name])
            for name, candidate in selected.choice.items()
            if candidate.rewrite.primitive
        }
        return sorted((key for key in chosen if key not in self.profile.times_ns), key=repr)
