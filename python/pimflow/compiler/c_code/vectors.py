"""Vectors in C: their types and the functions of `relay_passes.c_kernels.vector_calls`, for any C11 compiler.

Where the compiler has vector extensions (GCC, Clang), a vector up to the processor's width is one of its
types, and a wider one is two halves. Elsewhere a vector is an array of four numbers.
"""

from __future__ import annotations

import re

from pimflow.relay_passes.c_kernels.vector_calls import COMPARISONS, FUNCTIONS, LANES

SIGNS = {"gt": ">", "ge": ">=", "lt": "<", "le": "<=", "eq": "==", "ne": "!="}
ARITHMETIC = {"add": "a + b", "sub": "a - b", "mul": "a * b", "div": "a / b", "muladd": "a + b * c"}
ORDERED = {"max": "gt", "min": "lt"}  # as in TVM: `b` if either is NaN
LOADS = {"load": "from[i]", "gather": "from[i * stride]", "splat": "a"}
STORES = ("store", "scatter")
OPERANDS = {"splat": 1, "muladd": 3, **dict.fromkeys(COMPARISONS.values(), 4)}

WIDTH = """#ifndef PIMFLOW_LANES
#if defined(__GNUC__) && defined(__AVX512F__)
#define PIMFLOW_LANES 16
#elif defined(__GNUC__) && defined(__AVX__)
#define PIMFLOW_LANES 8
#elif defined(__GNUC__)
#define PIMFLOW_LANES 4
#else
#define PIMFLOW_LANES 1
#endif
#endif
#if defined(__GNUC__)
#define PIMFLOW_INLINE static inline __attribute__((always_inline, unused))
#else
#define PIMFLOW_INLINE static inline
#endif
"""


def prelude(code: str) -> str:
    """Definitions of the vectors and functions that `code` calls; empty if it calls none."""
    called = {(name, int(lanes)) for name, lanes in re.findall(r"\b([a-z]+)(4|8|16)\(", code)}
    names = sorted({name for name, _ in called if name in _VECTOR_FUNCTIONS})
    widest = max((lanes for name, lanes in called if name in _VECTOR_FUNCTIONS), default=0)
    if not names:
        return ""
    return WIDTH + "".join(_width(lanes, names) for lanes in LANES if lanes <= widest)


def _width(lanes: int, names: list[str]) -> str:
    """Definitions of the vector type with `lanes` lanes, and of its functions."""
    smallest = lanes == LANES[0]
    return "\n".join(
        [
            f"#if PIMFLOW_LANES >= {lanes}",
            f"typedef float float{lanes} __attribute__((vector_size({4 * lanes})));",
            f"typedef float{lanes} float{lanes}_at __attribute__((aligned(4), may_alias));",
            f"typedef int32_t mask{lanes} __attribute__((vector_size({4 * lanes})));",
            *(_native_definition(name, lanes) for name in names),
            "#else",
            "typedef struct {",
            f"  float lane[{lanes}];" if smallest else f"  float{lanes // 2} low, high;",
            f"}} float{lanes};",
            *(
                _lane_definition(name, lanes) if smallest else _halves_definition(name, lanes)
                for name in names
            ),
            "#endif\n",
        ]
    )


def _head(name: str, lanes: int) -> str:
    if name == "load":
        return f"PIMFLOW_INLINE float{lanes} load{lanes}(const float *from) {{"
    if name == "store":
        return f"PIMFLOW_INLINE void store{lanes}(float *to, float{lanes} a) {{"
    if name == "gather":
        return f"PIMFLOW_INLINE float{lanes} gather{lanes}(const float *from, int64_t stride) {{"
    if name == "scatter":
        return f"PIMFLOW_INLINE void scatter{lanes}(float *to, int64_t stride, float{lanes} a) {{"
    kind = "float" if name == "splat" else f"float{lanes}"
    parameters = ", ".join(f"{kind} {operand}" for operand in _operands(name))
    return f"PIMFLOW_INLINE float{lanes} {name}{lanes}({parameters}) {{"


def _operands(name: str) -> str:
    return "abcd"[: OPERANDS.get(name, 1 if name in _ONE_BY_ONE else 2)]


def _native_definition(name: str, lanes: int) -> str:
    """Definition of a function by the compiler's vector extensions."""
    if name == "load":
        body = f"  return *(const float{lanes}_at *)from;"
    elif name == "store":
        body = f"  *(float{lanes}_at *)to = a;"
    elif name == "splat":
        body = f"  float{lanes} made = {{{', '.join('a' * lanes)}}};\n  return made;"
    elif name == "gather":
        elements = ", ".join(f"from[{i} * stride]" for i in range(lanes))
        body = f"  float{lanes} made = {{{elements}}};\n  return made;"
    elif name == "scatter":
        body = f"  for (int i = 0; i < {lanes}; ++i) to[i * stride] = a[i];"
    elif name in ARITHMETIC:
        body = f"  return {ARITHMETIC[name]};"
    elif name in _ONE_BY_ONE:
        body = f"  for (int i = 0; i < {lanes}; ++i) a[i] = {_ONE_BY_ONE[name]}(a[i]);\n  return a;"
    else:
        yes, no = ("a", "b") if name in ORDERED else ("c", "d")
        mask = f"mask{lanes}"
        body = (
            f"  {mask} chosen = a {SIGNS[ORDERED.get(name, name)]} b;\n"
            f"  return (float{lanes})((({mask}){yes} & chosen) | (({mask}){no} & ~chosen));"
        )
    return f"{_head(name, lanes)}\n{body}\n}}"


def _lane_definition(name: str, lanes: int) -> str:
    """Definition of a function by a loop over lanes."""
    loop = f"for (int i = 0; i < {lanes}; ++i)"
    if name in STORES:
        index = "i" if name == "store" else "i * stride"
        return f"{_head(name, lanes)}\n  {loop} to[{index}] = a.lane[i];\n}}"
    if name in LOADS:
        value = LOADS[name]
    elif name in ARITHMETIC:
        value = re.sub(r"\b([abc])\b", r"\1.lane[i]", ARITHMETIC[name])
    elif name in _ONE_BY_ONE:
        value = f"{_ONE_BY_ONE[name]}(a.lane[i])"
    else:
        yes, no = ("a", "b") if name in ORDERED else ("c", "d")
        sign = SIGNS[ORDERED.get(name, name)]
        value = f"a.lane[i] {sign} b.lane[i] ? {yes}.lane[i] : {no}.lane[i]"
    body = f"  float{lanes} made;\n  {loop} made.lane[i] = {value};\n  return made;"
    return f"{_head(name, lanes)}\n{body}\n}}"


def _halves_definition(name: str, lanes: int) -> str:
    """Definition of a function by two calls of the function of half the width."""
    half = lanes // 2
    if name in STORES:
        step, stride = ("", "") if name == "store" else (" * stride", "stride, ")
        body = f"  {name}{half}(to, {stride}a.low);\n  {name}{half}(to + {half}{step}, {stride}a.high);"
        return f"{_head(name, lanes)}\n{body}\n}}"
    if name == "load":
        low, high = "from", f"from + {half}"
    elif name == "gather":
        low, high = "from, stride", f"from + {half} * stride, stride"
    elif name == "splat":
        low = high = "a"
    else:
        low, high = (
            ", ".join(f"{operand}.{part}" for operand in _operands(name)) for part in ("low", "high")
        )
    return (
        f"{_head(name, lanes)}\n  float{lanes} made;\n  made.low = {name}{half}({low});\n"
        f"  made.high = {name}{half}({high});\n  return made;\n}}"
    )


_ONE_BY_ONE = {f"v{name}": f"{name}f" for name in FUNCTIONS}
_VECTOR_FUNCTIONS = {*LOADS, *STORES, *ARITHMETIC, *ORDERED, *SIGNS, *_ONE_BY_ONE}
