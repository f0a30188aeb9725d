"""The times from which primitives are selected: measured on a machine, predicted, or from a file."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import TYPE_CHECKING

from pimflow.core.kernel import ConvGeometry
from pimflow.errors import UsageError
from pimflow.hardware import GpuSpec, system
from pimflow.primitive_selection.layers import Layers
from pimflow.primitive_selection.options import CUDA, SelectionOptions
from pimflow.primitive_selection.problem import SelectionResult
from pimflow.primitive_selection.profile import Profile

if TYPE_CHECKING:
    from pimflow.host.result_cache import ResultCache
    from pimflow.primitive_selection.machines import Machine

MODES = ("measured", "predicted", "mixed")
Progress = Callable[[float], None]


@contextlib.contextmanager
def selection_times(
    options: SelectionOptions, layers: Layers, cache: ResultCache | None, progress: Progress
) -> Iterator[PrimitiveTimes]:
    """Context manager for the times of a selection; until the block ends, more can be measured."""
    # Imports TVM, so not at the top of the file.
    from pimflow.pim_backend.runtime.targets import local_cuda
    from pimflow.primitive_selection.machines import is_remote, machine

    device, on_gpu = options.device, options.device == CUDA
    if options.target not in ("", "c") and not is_remote(device):
        raise UsageError(
            "--target: this machine's times are of code for itself, or of C (--target c); for another's "
            "give --device rpc:HOST:PORT/KEY too"
        )
    if options.gpu and not on_gpu:
        raise UsageError("--gpu says which GPU is modelled: give --device cuda too")
    measures = options.profile in MODES or not device or is_remote(device)
    if on_gpu and (options.gpu or local_cuda() is None):
        measures = False
    with machine(device, options.target) if measures else contextlib.nullcontext() as machine_in_use:
        yield PrimitiveTimes(options, layers, cache, machine_in_use, progress)


class PrimitiveTimes:
    """Times of primitives for the layers of a network, in `profile`."""

    def __init__(
        self,
        options: SelectionOptions,
        layers: Layers,
        cache: ResultCache | None,
        machine: Machine | None,
        progress: Progress,
    ):
        self._options, self._layers, self._cache, self._machine = options, layers, cache, machine
        self._on_gpu = options.device == CUDA
        if self._on_gpu and options.profile in ("predicted", "mixed"):
            raise UsageError(
                f"--profile {options.profile}: times of a GPU are measured, modelled, or of a file"
            )
        if self._on_gpu and machine is None:
            self.profile = self._gpu_model_profile()
            return
        self.profile = self._machine_profile(progress) if options.profile in MODES else self._user_profile()
        if options.profile in ("predicted", "mixed"):
            self.profile = self._with_predictions(self.profile)

    def _gpu_model_profile(self) -> Profile:
        from pimflow.primitive_selection import gpu_model_times

        options, layers = self._options, self._layers
        gpu = options.gpu or system().gpu
        gpu = gpu if isinstance(gpu, GpuSpec) else GpuSpec.load(gpu)
        if options.profile == "measured":
            return gpu_model_times.analytic_profile(
                layers.primitive_layers.values(), layers.moves.values(), gpu
            )
        profile = options.profile if isinstance(options.profile, Profile) else Profile.read(options.profile)
        profile.require_device(gpu_model_times.model_device(gpu), None)
        return profile

    def _machine_profile(self, progress: Progress) -> Profile:
        from pimflow.primitive_selection import measuring
        from pimflow.primitive_selection.machines import is_remote

        options, layers = self._options, self._layers
        max_primitives = 0 if options.profile == "predicted" else options.measure
        profile = measuring.Measurer(self._cache, progress, self._machine).measure(
            layers.primitive_layers.values(), layers.moves.values(), max_primitives, pools=layers.pool_layouts
        )
        measured_now = is_remote(options.device) or self._on_gpu
        profile.require_device(self._machine.device, None if measured_now else options.device)
        return profile

    def _user_profile(self) -> Profile:
        source = self._options.profile
        profile = source if isinstance(source, Profile) else Profile.read(source)
        machine = self._machine
        profile.require_device(machine and machine.device, None if machine else self._options.device)
        return profile

    def _with_predictions(self, profile: Profile) -> Profile:
        from pimflow.primitive_selection.prediction import predict_ns

        return replace(profile, predicted_ns=predict_ns(profile, self._layers.primitive_layers.values()))

    def refine(self, selected: SelectionResult) -> bool:
        """Measure primitives that were selected by a predicted time; False if there is nothing to measure."""
        predicts = self._options.profile == "mixed" and not self._on_gpu
        keys = self._keys_to_measure(selected) if predicts else []
        if keys:
            from pimflow.primitive_selection import measuring

            measurer = measuring.Measurer(self._cache, machine=self._machine)
            new_profile = measurer.measure([], [], 0, extra_keys=keys)
            times = self.profile.times_ns | new_profile.times_ns
            failed = self.profile.failed | new_profile.failed
            self.profile = self._with_predictions(replace(self.profile, times_ns=times, failed=failed))
        return bool(keys)

    def _keys_to_measure(self, selected: SelectionResult) -> list[tuple[str, ConvGeometry]]:
        selected_keys = {
            (candidate.primitive, self._layers.primitive_layers[name])
            for name, candidate in selected.choice.items()
            if candidate.primitive
        }
        return sorted((key for key in selected_keys if key not in self.profile.times_ns), key=repr)
