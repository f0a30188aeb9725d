"""Blocks of a CUDA kernel run on the CPU, a thread a thread: its code, its barriers, its half precision."""

from __future__ import annotations

import ctypes
import re
import subprocess
from collections.abc import Mapping
from pathlib import Path

import numpy as np

SHIM = """
#include <algorithm>
#include <barrier>
#include <cmath>
#include <thread>
#include <vector>
using half = _Float16;
using std::max, std::min;
#define __global__
#define __launch_bounds__(n)
#define __shared__
#define __align__(n) __attribute__((aligned(n)))
struct Index { int x; };
static thread_local Index threadIdx, blockIdx;
static std::barrier<> *gate;
static void __syncthreads() { gate->arrive_and_wait(); }
"""
MAIN = """
extern "C" {{ alignas(64) half {pool}[{elements}]; }}
extern "C" void run(void **a) {{
  std::barrier<> own({threads}); gate = &own;
  std::vector<std::thread> all;
  for (int t = 0; t < {threads}; ++t) all.emplace_back([=] {{
    threadIdx.x = t;
    for (int b = 0; b < {blocks}; ++b) {{ blockIdx.x = b; {name}({arguments}); __syncthreads(); }}
  }});
  for (auto &each : all) each.join();
}}
"""


def run(
    source: str, name: str, arrays: Mapping[str, np.ndarray], blocks: int, folder: Path, elements: int
) -> None:
    """Run kernel `name` of `source` on `arrays`, by parameter, which it changes.

    Parameters
    ----------
    elements : int
        Of its pool in shared memory; another access than to these is found by chance alone.
    """
    found = re.search(
        rf'extern "C" __global__ void __launch_bounds__\((\d+)\) {name}\(([^)]*)\) {{.*?\n}}\n', source, re.S
    )
    threads, parameters = int(found[1]), re.findall(r"(\w+) ?\* __restrict__ (\w+)_ptr", found[2])
    pool = re.search(r"extern __shared__ __align__\(\d+\) half (\w+)\[\];", found[0])[1]
    arguments = ", ".join(f"({kind}*)a[{i}]" for i, (kind, _) in enumerate(parameters))
    names = {"threads": threads, "blocks": blocks, "name": name, "pool": pool, "elements": elements}
    code = SHIM + found[0] + MAIN.format(arguments=arguments, **names)
    (folder / "kernel.cc").write_text(code)
    built = folder / "kernel.so"
    flags = ["-std=c++20", "-O1", "-w", "-shared", "-fPIC", "-pthread"]
    subprocess.run(["c++", *flags, str(folder / "kernel.cc"), "-o", str(built)], check=True)
    given = [arrays[parameter].ctypes.data for _, parameter in parameters]
    ctypes.CDLL(str(built)).run((ctypes.c_void_p * len(given))(*given))
