"""Run compiled directories: outputs, times, and differences between targets."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import tvm

from pimflow.commands.run.options import RunOptions
from pimflow.commands.shared.arguments import public
from pimflow.commands.shared.inputs import Inputs, inputs_by_name
from pimflow.compiler.artifact import PlacedRegions, load_packed_states
from pimflow.compiler.c_code import builds
from pimflow.compiler.c_code.source import FILES, CSource
from pimflow.compiler.interface import LIBRARIES, Interface
from pimflow.compiler.timing import call_times_ns
from pimflow.compiler.verification import layer_of_symbol, require_fp16_range
from pimflow.core.frames import Tabular
from pimflow.core.json_form import Json, json_form
from pimflow.core.output_error import OUTPUT_BOUND, relative_error
from pimflow.errors import ArtifactError, UnknownNameError, UsageError, VerificationError
from pimflow.pim_backend.runtime.network_module import infer as inferred
from pimflow.pim_backend.runtime.network_module import load
from pimflow.pim_backend.runtime.targets import C_TARGET, cpu_name, target_by_name, target_device


@dataclass(frozen=True, kw_only=True)
class Inference(Tabular, rows="output_rows"):
    """The result of a run.

    Attributes
    ----------
    names : tuple of str
        Names of the outputs; their numbers if the model has no names for them.
    compiler : str
        Compiler of the C library; empty for another target.
    threads : int or None
        Threads of the C library; None for another target, whose threads are those of TVM's runtime.
    calls : int
        Number of timed calls, after warm-up.
    median_ns : float or None
        Median time of a call; None if none was timed.
    max_relative_error : dict of str to float
        By other target, the largest difference of outputs, over its largest value.
    """

    target: str
    outputs: list[np.ndarray]
    names: tuple[str, ...] = ()
    compiler: str = ""
    threads: int | None = None
    calls: int = 0
    median_ns: float | None = None
    max_relative_error: dict[str, float] = field(default_factory=dict)

    def to_json(self) -> dict[str, Json]:
        """The result as JSON; outputs by shape, dtype and range, without their values."""
        fields = ("target", "compiler", "threads", "calls", "median_ns", "max_relative_error")
        return {"outputs": self.output_rows} | {name: json_form(getattr(self, name)) for name in fields}

    @property
    def output_rows(self) -> list[Json]:
        """Shape, dtype and range of each output."""
        named = enumerate(zip(self.names, self.outputs))
        return [{"output": index, "name": name, **_summary(array)} for index, (name, array) in named]


def _summary(array: np.ndarray) -> dict[str, Json]:
    """Shape, dtype and range of an array; NaN and infinity, which JSON lacks, become None."""
    ends = (float(array.min()), float(array.max())) if array.size else (math.nan, math.nan)
    low, high = (end if math.isfinite(end) else None for end in ends)
    return {"shape": [*array.shape], "dtype": str(array.dtype), "min": low, "max": high}


@public()
def run(
    directory: str | os.PathLike[str], inputs: Inputs | None = None, *, target: str | None = None
) -> list[np.ndarray]:
    """Run a compiled directory, PIM regions by their command streams; returns the outputs.

    Parameters
    ----------
    inputs, target
        See `infer`.
    """
    return infer(directory, inputs, target=target).outputs


@public(RunOptions)
def infer(
    directory: str | os.PathLike[str],
    inputs: Inputs | None = None,
    *,
    progress: Callable[[str], None] = lambda _: None,
    **keywords: Any,
) -> Inference:
    """Run a compiled directory.

    Parameters
    ----------
    inputs : mapping of str to ndarray, ndarray or path, optional
        Every input by name, of its shape, converted to its dtype, or an ``.npz`` file of them; a single array
        for a network of one input; drawn if None. Arrays with a further first dimension are several samples;
        then outputs have this dimension too.
    input_values : mapping of str to ndarray, path or text, optional
        Further inputs; see `commands.shared.inputs.InputOptions`.
    target : str, optional
        The target that it was compiled for (the default), or ``llvm+pim``, which every compiled directory
        has. ``c`` is built first, by this machine's C compiler.
    progress : callable
        Called with a text that says what is being done.

    Raises
    ------
    ArtifactError
        If it is no compiled directory, one of its files was changed, an input is missing, unknown or of
        another shape, the target's device is missing, or C cannot be built.
    UnknownNameError
        If it was not built for `target`.
    UsageError
        If there is no other target to compare with, or for too many threads.
    VerificationError
        If outputs differ by more than the bound of the storage type (`core.output_error.OUTPUT_BOUND`), and
        by more than the bound that compilation used; if values of a layer on PIM leave fp16.
    """
    options, path = RunOptions(inputs=inputs, **keywords), Path(directory)
    interface, threads = Interface.load(path), options.threads
    samples = options.samples(interface, interface.example_inputs)
    target = options.target or interface.targets[0]
    if target not in interface.targets:
        raise UnknownNameError("target", target, interface.targets)
    if threads is not None and target != C_TARGET:
        raise UsageError(f"threads are of the C library; those of {target} are TVM_NUM_THREADS")
    for name in interface.sha256:
        interface.check(path, name)
    if target == C_TARGET:
        progress("building C")
    runner = (
        _CRunner(path, interface, threads or 1) if target == C_TARGET else _Runner(path, interface, target)
    )
    sample_outputs = [runner.outputs(arrays) for arrays in samples]
    target_errors = (
        _target_errors(path, interface, target, samples, sample_outputs) if options.compare else {}
    )
    outputs = sample_outputs[0] if len(samples) == 1 else [np.stack(ys) for ys in zip(*sample_outputs)]
    return Inference(
        target=target,
        outputs=outputs,
        names=_names(interface, len(outputs)),
        compiler=runner.compiler,
        threads=runner.threads,
        calls=options.repeat,
        median_ns=runner.median_ns(samples[0], options.repeat) if options.repeat else None,
        max_relative_error=target_errors,
    )


class Session:
    """A compiled directory that stays loaded, for steps of a decoder with resident caches.

        session = pimflow.Session("build/decoder")
        for position, token in enumerate(tokens):
            logits = session.run({"input_ids": [[token]], "position": [position]})["logits"]

    Other inputs of the model, such as ``attention_mask``, are set likewise. An input keeps its value until it
    is set again.

    Parameters
    ----------
    directory : path
        Directory that `pimflow compile --context N` wrote. For a network without caches, each run is an
        inference.
    target : str, optional
        As for `infer`, but not ``c``.

    Raises
    ------
    ArtifactError, UnknownNameError
        As `infer`.
    """

    def __init__(self, directory: str | os.PathLike[str], *, target: str | None = None):
        path = Path(directory)
        self._interface = Interface.load(path)
        targets = [name for name in self._interface.targets if name != C_TARGET]
        target = target or next(iter(targets), C_TARGET)
        if target not in targets:
            raise UnknownNameError("target", target, targets)
        for name in self._interface.sha256:
            self._interface.check(path, name)
        runner = _Runner(path, self._interface, target)
        self._states, self._executor = runner.states, runner.executor()
        self._outputs = self._executor["get_num_outputs"]()
        self.set(
            {
                name: np.zeros(*self._interface.inputs[name])  # no token yet
                for name in self._interface.states
            }
        )

    @property
    def caches(self) -> tuple[str, ...]:
        """Names of the inputs that are resident caches."""
        return tuple(self._interface.states)

    def set(self, inputs: Mapping[str, np.ndarray] | np.ndarray) -> None:
        """Set some inputs by name, caches too; the others keep their values.

        Raises
        ------
        ArtifactError, UsageError
            If an input is unknown, of another shape or not numeric, or if a position is outside the cache.
        """
        named = inputs_by_name(inputs, list(self._interface.inputs))
        for name, value in self._interface.order_inputs(named, allow_missing=True).items():
            packed = self._states.pack_input(name, value)
            self._executor["set_input"](name, tvm.runtime.tensor(np.asarray(packed, order="C")))

    def run(self, inputs: Mapping[str, np.ndarray] | np.ndarray | None = None) -> dict[str, np.ndarray]:
        """Set `inputs` and compute; returns outputs that are no caches, by their names or numbers."""
        self.set({} if inputs is None else inputs)
        self._executor["run"]()
        state_outputs = {state["output"] for state in self._interface.states.values()}
        names = _names(self._interface, self._outputs)
        return {
            name: self._executor["get_output"](number).numpy()
            for number, name in enumerate(names)
            if number not in state_outputs
        }

    def cache(self, name: str) -> np.ndarray:
        """The contents of a cache, in the model's layout; raises `UnknownNameError` for another input."""
        if name not in self._interface.states:
            raise UnknownNameError("cache", name, self.caches)
        value = self._executor["get_input"](name).numpy()
        cache = self._states.inputs.get(name)
        return value if cache is None else cache.unpack(value)


def _names(interface: Interface, outputs: int) -> tuple[str, ...]:
    named = interface.output_names
    return named if len(named) == outputs else tuple(map(str, range(outputs)))


def _target_errors(
    path: Path,
    interface: Interface,
    target: str,
    samples: Sequence[Mapping[str, np.ndarray]],
    sample_outputs: Sequence[list[np.ndarray]],
) -> dict[str, float]:
    """Largest difference of the outputs of all samples from those of each other target that runs here."""
    other_targets = [name for name in interface.targets if name != target and _runs_here(name)]
    if not other_targets:
        raise UsageError(f"{path} has nothing besides {target} that runs here: nothing to compare with")
    placed, max_errors = PlacedRegions.load(path), {}
    bounds = [
        max(OUTPUT_BOUND[placed.dtype], stored_bound)
        for stored_bound in placed.bounds or [0.0] * len(sample_outputs[0])
    ]
    for name in other_targets:
        runner = _CRunner(path, interface, 1) if name == C_TARGET else _Runner(path, interface, name)
        errors = [
            [relative_error(y, reference) for y, reference in zip(ys, runner.outputs(arrays), strict=True)]
            for arrays, ys in zip(samples, sample_outputs, strict=True)
        ]
        output_errors = [max(values) for values in zip(*errors, strict=True)]
        max_errors[name] = max(output_errors)
        exceeded = [
            (error, bound) for error, bound in zip(output_errors, bounds, strict=True) if not error <= bound
        ]
        if exceeded:
            raise VerificationError(
                f"{path}: outputs of {target} differ from those of {name} by {exceeded[0][0]:.2e} of the "
                f"largest value; the bound is {exceeded[0][1]:.0e}"
            )
    return max_errors


def _runs_here(target: str) -> bool:
    return (
        builds.local_compiler() is not None
        if target == C_TARGET
        else bool(target_device(target_by_name(target)).exist)
    )


class _Runner:
    """A stored library; raises `ArtifactError` if it was made for another CPU, or cannot be loaded."""

    compiler, threads = "", None

    def __init__(self, path: Path, interface: Interface, target: str):
        if target == "llvm+pim" and interface.cpu not in ("", here := cpu_name()):
            raise ArtifactError(
                f"{path} was compiled with --select for the CPU '{interface.cpu}', and this is '{here}': "
                "compile it again here"
            )
        interface.check(path, LIBRARIES[target])
        self._path = path
        self._network, self._device = load(path / LIBRARIES[target]), target_device(target_by_name(target))
        self.states = load_packed_states(path, interface)

    def executor(self) -> tvm.runtime.Module:
        """A new graph executor of the network."""
        return self._network["default"](self._device)

    def outputs(self, arrays: Mapping[str, np.ndarray]) -> list[np.ndarray]:
        """Run one inference; raises `VerificationError` if values of a PIM region leave fp16."""
        with require_fp16_range(self._layer):
            packed_outputs = inferred(self._network, self.states.pack(arrays), self._device)
        return self.states.unpack(packed_outputs)

    def _layer(self, symbol: str) -> str:
        placed = PlacedRegions.load(self._path)
        return layer_of_symbol(symbol, placed.graph) if placed.dtype == "fp16" else ""

    def median_ns(self, arrays: Mapping[str, np.ndarray], calls: int) -> float:
        """Median time of a call, with inputs in the device's memory."""
        executor = self.executor()
        for name, value in self.states.pack(arrays).items():
            executor["set_input"](name, tvm.runtime.tensor(np.asarray(value, order="C")))

        def run() -> None:
            """Run one inference, and wait for its end."""
            executor["run"]()
            self._device.sync()

        run()
        return float(median(call_times_ns(run, calls)))


class _CRunner:
    """The C library, built by this machine's compiler.

    Raises
    ------
    ArtifactError
        If there is no compiler, or it fails.
    UsageError
        If it cannot run on so many threads.
    """

    def __init__(self, path: Path, interface: Interface, threads: int):
        compiler = builds.local_compiler()
        if compiler is None:
            raise ArtifactError(f"{path}: {builds.NO_COMPILER}; or run the twin: --target llvm+pim")
        for name in FILES:
            interface.check(path, name)
        inputs = tuple(interface.inputs.values())
        self._library = builds.Library(CSource.load(path, inputs, interface.outputs, interface.pool_bytes))
        if not 0 < threads <= self._library.max_threads:
            max_threads = self._library.max_threads
            raise UsageError(
                f"{threads} threads: the C library runs on at most {max_threads} here, at least on one"
            )
        self.compiler, self.threads = compiler.version, threads

    def outputs(self, arrays: Mapping[str, np.ndarray]) -> list[np.ndarray]:
        return self._library(list(arrays.values()), self.threads)

    def median_ns(self, arrays: Mapping[str, np.ndarray], calls: int) -> float:
        return self._library.call_ns(list(arrays.values()), self.threads, calls)
