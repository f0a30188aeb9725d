"""Code generator ``relax.ext.pim``: compiles functions that carry a PIM program to a runtime module."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import tvm_ffi
from tvm import relax

from pimflow.core.attention import SCORES, VALUES
from pimflow.core.program import MemoryImage, PimProgram
from pimflow.host import interrupts, native
from pimflow.pim_backend.programs.cache_layout import KeyLayout, ValueLayout
from pimflow.pim_backend.programs.cache_places import all_places_program
from pimflow.pim_backend.programs.cached_attention import CachedAttention
from pimflow.pim_backend.programs.layout import memory_image
from pimflow.pim_backend.programs.packed_cache import PackedCache

_create_module = native.get("pimflow.runtime.create_module")
_add_region = native.get("pimflow.runtime.add_region")
_add_cache_product = native.get("pimflow.runtime.add_cache_product")
_set_observer = native.get("pimflow.runtime.set_observer")
_HEADER = native.Record("pimflow.simulators.program_header")
_APPEND_SIZES = native.Record("pimflow.runtime.append_sizes")


def compile_functions(functions: Sequence[Any], _options: object, _constant_names: object) -> list[Any]:
    """One runtime module for all outlined functions (see `OutlinePim` and `OutlineAttention`)."""
    module = _create_module()
    for function in functions:
        if "pim.cache" in function.attrs:
            cached = CachedAttention.from_json(str(function.attrs["pim.cache"]))
            product, group = str(function.attrs["pim.product"]), int(function.attrs["pim.group"])
            add_cache_product(module, str(function.attrs["global_symbol"]), cached, product, group)
            continue
        stored = str(function.attrs["pim.program"])
        program = PimProgram.from_printed_text(stored) or PimProgram.from_json(stored)
        values = [binding.value for binding in function.body.blocks[0].bindings]
        image = memory_image(program, _filters(values))
        bias = _bias(values) if program.initial == "bias" else None
        channels = int(function.params[0].ty.shape.values[-1])
        add_region(module, str(function.attrs["global_symbol"]), program, image, bias, channels)
    return [module]


def _filters(values: Sequence[relax.Expr]) -> np.ndarray:
    """The filters of the product in a function, [oc, K]."""
    products = ("relax.matmul", "relax.nn.conv2d")
    product = next(v for v in values if isinstance(v, relax.Call) and v.op.name in products)
    filters = np.from_dlpack(product.args[1].value)
    return filters.T if filters.ndim == 2 else filters.reshape(len(filters), -1)


def _bias(values: Sequence[relax.Expr]) -> np.ndarray:
    """The bias that is added to a product, one value for each output channel."""
    sums = (v for v in values if isinstance(v, relax.Call) and v.op.name == "relax.add")
    value, (bias,) = next((s, c) for s in sums if (c := [a for a in s.args if not isinstance(a, relax.Var)]))
    channels = int(value.ty.shape.values[-1])
    return np.array(np.broadcast_to(np.from_dlpack(bias.value).reshape(-1), channels), np.float32)


def add_region(
    module: object,
    symbol: str,
    program: PimProgram,
    image: MemoryImage,
    bias: np.ndarray | None = None,
    input_channels: int = 0,
) -> None:
    """Put a region into a runtime `module`.

    Its function is ``symbol(input, output)``; ``symbol(input, initial, output)`` where its latches start from
    a tensor (`PimProgram.initial`); ``symbol(input, added, output)`` where its product adds a tensor
    (`PimProgram.added_channels`).

    Parameters
    ----------
    bias : ndarray, [oc], float32, optional
        Initial values of its latches, if they are a bias.
    input_channels : int, optional
        Channels of the input, of which the program takes the last; by default it takes all.
    """
    program_channels = program.geometry.c - program.added_channels
    words, offsets = program.program_words()
    table = np.ascontiguousarray(image.table, np.int32)
    start, factors = (np.empty(0, np.float32) if a is None else a for a in (bias, image.scales))
    arrays = (_HEADER.row(**program.header()), words, offsets, image.lane_bits, table, start, factors)
    channels = (program_channels, input_channels or program_channels, program.added_channels)
    _add_region(module, symbol, *(tvm_ffi.from_dlpack(a) for a in arrays), *channels)


def add_cache_product(
    module: object, symbol: str, cached: CachedAttention, product: str, group_index: int = 0
) -> None:
    """Put a product of a group of attention into a runtime `module`.

    If `product` is ``scores``, its function is ``symbol(queries, positions, keys, values, new keys, new
    values, scores)``. It first appends the new keys and values to the group's part of both caches. Queries
    and new tokens are those of all groups, scores those of the group. Otherwise it is ``symbol(weights,
    positions, values, sums)``, with weights and sums, [heads, partial sums, elements], of the group. Both
    read the places up to the largest position; scores and partial sums beyond it are zero.
    """
    group = cached.groups[group_index]
    cache = cached.keys if product == SCORES else cached.values
    appends: list[dict[str, np.ndarray]] = []
    if product == SCORES:
        a = group.attention
        first = group_index * a.batch * a.kv_heads
        sizes = _APPEND_SIZES.row(
            matrices=a.batch * a.kv_heads,
            places=a.extent,
            first_matrix=first,
            first_request=first // cached.attention.kv_heads,
            requests=a.batch,
        )
        kinds: list[tuple[KeyLayout | ValueLayout, PackedCache]]
        kinds = [(group.keys, cached.keys), (group.values, cached.values)]
        for (layout, packed), append_program in zip(kinds, group.append_programs(0), strict=True):
            words, offsets = all_places_program(layout).program_words()
            appends.append(
                {
                    "header": _HEADER.row(**append_program.header()),
                    "words": words,
                    "offsets": offsets,
                    "table": packed.page_table(group_index),
                    "sizes": sizes,
                }
            )
    dynamic_product = group.dynamic_product(product, cached.schedule)
    before = 0 if product == VALUES else group_index * math.prod(group.attention.query_shape)
    operand_indices = dynamic_product.full_product.operand_indices[0]
    operand_places = np.where(operand_indices < 0, -1, operand_indices + before).astype(np.int32)
    result_indices = np.ascontiguousarray(np.moveaxis(dynamic_product.full_product.result_indices, 0, -2))
    arrays = {
        "header": _HEADER.row(**dynamic_product.program.header()),
        **dynamic_product.arrays(),
        "operand_indices": operand_places,
        "result_indices": result_indices,
        "first_tokens": dynamic_product.first_tokens,
        "table": cache.page_table(group_index),
    }
    *append_tensors, product_tensors = (
        {name: tvm_ffi.from_dlpack(array) for name, array in part.items()} for part in (*appends, arrays)
    )
    _add_cache_product(module, symbol, append_tensors, product_tensors)


@contextlib.contextmanager
def observe_regions(observer: Callable[[str, list[np.ndarray], np.ndarray], None]) -> Iterator[None]:
    """Within the block, call `observer` after every PIM region with (symbol, operands, output).

    Operands are the input, the initial values of its latches and, if there is one, the tensor that its
    product adds. For a product of attention they are vectors, positions, caches (as they are after the
    region), and new tokens.
    """
    with interrupts.defer_interrupts() as hold:

        def call(symbol: str, operands: Sequence[Any], y: Any) -> None:
            observer(str(symbol), [np.from_dlpack(operand) for operand in operands], np.from_dlpack(y))

        _set_observer(tvm_ffi.convert(hold.allow_interrupts(call)))
        try:
            yield
        finally:
            _set_observer(None)


def register() -> None:
    """Register the code generator with TVM; importing pimflow calls this."""
    tvm_ffi.register_global_func("relax.ext.pim", compile_functions, override=True)
