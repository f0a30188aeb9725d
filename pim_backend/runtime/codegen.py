"""``relax.ext.pim``: functions that carry a PIM program become a runtime module."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence

import numpy as np
import tvm_ffi
from tvm import relax

from pimflow.core.program import MemoryImage, PimProgram
from pimflow.host import interrupts, native
from pimflow.pim_backend.programs.layout import memory_image

_create_module = native.get("pimflow.runtime.create_module")
_add_region = native.get("pimflow.runtime.add_region")
_set_observer = native.get("pimflow.runtime.set_observer")


def compile_functions(functions: Sequence, _options: object, _constant_names: object) -> list:
    """One runtime module with every outlined function (see `OutlinePim`)."""
    module = _create_module()
    for function in functions:
        stored = str(function.attrs["pim.program"])
        program = PimProgram.printed(stored) or PimProgram.from_json(stored)
        values = [binding.value for binding in function.body.blocks[0].bindings]
        product = next(v for v in values if isinstance(v, relax.Call) and v.op.name == "relax.matmul")
        weights = np.from_dlpack(product.args[1].value).T
        image = memory_image(program, weights)
        add_region(module, str(function.attrs["global_symbol"]), program, image)
    return [module]


def add_region(module: object, symbol: str, program: PimProgram, image: MemoryImage) -> None:
    """Put a region into a runtime `module`, to be called as ``symbol(input, output)``."""
    words, offsets = program.packed()
    table = np.ascontiguousarray(image.table, np.int32)
    arrays = (program.header(), words, offsets, image.lanes, table)
    _add_region(module, symbol, *(tvm_ffi.from_dlpack(a) for a in arrays))


@contextlib.contextmanager
def observed(observer: Callable[[str, np.ndarray, np.ndarray], None]) -> Iterator[None]:
    """Have `observer` called with (symbol, input, output) after every PIM region that runs meanwhile."""
    with interrupts.held() as hold:

        def call(symbol: str, x: object, y: object) -> None:
            observer(str(symbol), np.from_dlpack(x), np.from_dlpack(y))

        _set_observer(tvm_ffi.convert(hold.releasing(call)))
        try:
            yield
        finally:
            _set_observer(None)


def register() -> None:
    """Make TVM find the code generator; importing pimflow does it."""
    tvm_ffi.register_global_func("relax.ext.pim", compile_functions, override=True)
