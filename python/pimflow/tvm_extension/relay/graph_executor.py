"""``tvm.contrib.graph_executor``: the executor of networks from ``relay.build``."""

from __future__ import annotations

from statistics import fmean

import numpy as np
import tvm

from pimflow.compiler.timing import call_times_ns
from pimflow.errors import UnknownNameError, UsageError


class GraphModule:
    """A network on a device: set inputs, run, get outputs.

    Parameters
    ----------
    module : Module
        The result of ``lib["default"](device)``, with `lib` from ``relay.build`` or ``load_module``.
    """

    def __init__(self, module: tvm.runtime.Module):
        if not isinstance(module, tvm.runtime.Module) or not module.implements_function("set_input"):
            raise UsageError('GraphModule takes an executor: lib["default"](tvm.cpu())')
        self._set_input, self._get_output = module["set_input"], module["get_output"]
        self.module = module
        self._inputs = [str(name) for name in module["get_input_names"]()]

    def set_input(self, key: str | int | None = None, value: object = None, **params: object) -> None:
        """Copy values to inputs: one by name or index, or several by keyword.

        Keywords that name no input are ignored, since `relay.build` has bound parameters already.

        Raises
        ------
        UnknownNameError, ArtifactError
            If `key` names no input, or if a value has another shape.
        """
        if isinstance(key, str) and key not in self._inputs:
            raise UnknownNameError("input", key, self._inputs)
        inputs = {} if key is None else {key: value}
        for name, array in {**inputs, **{k: v for k, v in params.items() if k in self._inputs}}.items():
            dtype = str(self.get_input(name).dtype)
            try:
                array = array.numpy() if isinstance(array, tvm.runtime.Tensor) else np.asarray(array)
            except ValueError as error:
                raise UsageError(f"input '{name}' is no array: {error}") from error
            if array.dtype != dtype and not np.can_cast(array.dtype, dtype, "same_kind"):
                raise UsageError(f"input '{name}' has dtype {dtype}, not {array.dtype}")
            self._set_input(name, tvm.runtime.tensor(np.asarray(array, dtype, order="C")))

    def run(self, **inputs: object) -> None:
        """Set `inputs` and run one inference; raises `ArtifactError` if an input was never set."""
        self.set_input(**inputs)
        self.module["run"]()

    def get_num_inputs(self) -> int:
        """Number of inputs."""
        return self.module["get_num_inputs"]()

    def get_num_outputs(self) -> int:
        """Number of outputs."""
        return self.module["get_num_outputs"]()

    def get_input(self, index: int | str, out: tvm.runtime.Tensor | None = None) -> tvm.runtime.Tensor:
        """The tensor that holds an input, or `out` with its values."""
        tensor = self.module["get_input"](index)
        return tensor if out is None else tensor.copyto(out)

    def get_input_index(self, name: str) -> int:
        """Index of an input; -1 if there is none of that name."""
        return self.module["get_input_index"](name)

    def get_input_info(self) -> tuple[dict[str, tuple[int, ...]], dict[str, str]]:
        """Shapes and dtypes of the inputs, by name."""
        tensors = {name: self.get_input(name) for name in self._inputs}
        return {n: tuple(t.shape) for n, t in tensors.items()}, {n: str(t.dtype) for n, t in tensors.items()}

    def get_output(self, index: int, out: tvm.runtime.Tensor | None = None) -> tvm.runtime.Tensor:
        """A result of the last run, or `out` with its values."""
        tensor = self._get_output(index)
        return tensor if out is None else tensor.copyto(out)

    def benchmark(  # its parameters are those of TVM
        self,
        device: tvm.runtime.Device,
        func_name: str = "run",
        repeat: int = 5,
        number: int = 5,
        min_repeat_ms: int | None = None,
        end_to_end: bool = False,
        **inputs: object,
    ) -> object:
        """Measure inferences on this machine. The PIM part is simulated, so this does not predict its time.

        Parameters
        ----------
        min_repeat_ms : int, optional
            Minimum duration of a measurement: `number` grows until it is reached.
        end_to_end : bool
            Whether to include copies of `inputs` to the device and of results from it.

        Returns
        -------
        BenchmarkResult
            With ``mean``, ``median``, ``min``, ``max``, ``std`` and ``results``, in seconds.
        """
        if repeat < 1 or number < 1:
            raise UsageError(f"benchmark(repeat={repeat}, number={number}): give 1 or more of both")
        self.set_input(**inputs)
        if not end_to_end:
            timer = self.module.time_evaluator(
                func_name, device, number=number, repeat=repeat, min_repeat_ms=min_repeat_ms or 0
            )
            return timer()
        from tvm.runtime.module import BenchmarkResult

        def infer() -> None:
            """One inference with its copies."""
            self.run(**inputs)
            for index in range(self.get_num_outputs()):
                self.get_output(index).numpy()

        return BenchmarkResult([1e-9 * fmean(call_times_ns(infer, number)) for _ in range(repeat)])

    def load_params(self, _params: bytes) -> None:
        """Not supported: raises `UsageError`; `relay.build` binds weights as constants."""
        raise UsageError("weights are bound when the network is built: relay.build(mod, params=params)")

    def __getitem__(self, key: str) -> object:
        return self.module[key]


def create(graph_json_str: object, libmod: object, device: object) -> GraphModule:
    """Not supported: raises `UsageError`; there is no graph JSON."""
    raise UsageError('there is no graph JSON; use GraphModule(lib["default"](device))')
