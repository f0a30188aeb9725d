"""Blocks of a CUDA kernel run on the CPU, a thread a thread: its code, its barriers, its half precision."""

import ctypes
import re
import subprocess
from collections.abc import Mapping
from pathlib import Path

import numpy as np

SHIM = """
#include <algorithm>
#include <atomic>
#include <barrier>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <memory>
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
static std::vector<std::unique_ptr<std::barrier<>>> warps;
static void __syncthreads() { gate->arrive_and_wait(); }
static void __syncwarp() { warps[threadIdx.x / 32]->arrive_and_wait(); }
struct uint4 { unsigned x, y, z, w; };
static uint4 make_uint4(unsigned x, unsigned y, unsigned z, unsigned w) { return {x, y, z, w}; }
static half __float2half_rn(float x) { return half(x); }
static unsigned __pack_half2(half x, half y) {
  unsigned short a, b;
  memcpy(&a, &x, 2); memcpy(&b, &y, 2);
  return unsigned(b) << 16 | a;
}
static std::atomic<int64_t> multiplied;
// Every thread of a warp has all of a fragment, and computes all of it.
namespace nvcuda::wmma {
struct accumulator; struct matrix_a; struct matrix_b; struct row_major;
enum Order { mem_row_major };
template <typename Use, int m, int n, int k, typename T, typename Layout = void> struct fragment {
  float x[16][16];
};
template <typename F> void fill_fragment(F &f, float value) {
  for (auto &row : f.x) for (float &x : row) x = value;
}
template <typename F, typename T> void load_matrix_sync(F &f, const T *p, int pitch) {
  if (reinterpret_cast<size_t>(p) % 32 || pitch % 8) abort();  // as the CUDA programming guide demands
  for (int i = 0; i < 16; ++i) for (int j = 0; j < 16; ++j) f.x[i][j] = p[i * pitch + j];
}
template <typename F> void store_matrix_sync(float *p, const F &f, int pitch, Order) {
  if (reinterpret_cast<size_t>(p) % 32 || pitch % 4) abort();
  for (int i = 0; i < 16; ++i) for (int j = 0; j < 16; ++j) p[i * pitch + j] = f.x[i][j];
}
template <typename D, typename A, typename B> void mma_sync(D &d, const A &a, const B &b, const D &) {
  multiplied += threadIdx.x % 32 == 0;
  for (int i = 0; i < 16; ++i) for (int k = 0; k < 16; ++k) for (int j = 0; j < 16; ++j)
    d.x[i][j] += a.x[i][k] * b.x[k][j];
}
}
"""
MAIN = """
extern "C" {{ alignas(64) half {pool}[{elements}]; }}
extern "C" int64_t run(void **a) {{
  std::barrier<> own({threads}); gate = &own;
  for (int w = 0; w < {threads} / 32; ++w) warps.push_back(std::make_unique<std::barrier<>>(32));
  std::vector<std::thread> all;
  for (int t = 0; t < {threads}; ++t) all.emplace_back([=] {{
    threadIdx.x = t;
    for (int b = 0; b < {blocks}; ++b) {{ blockIdx.x = b; {name}({arguments}); __syncthreads(); }}
  }});
  for (auto &each : all) each.join();
  return multiplied;
}}
"""


def run(source: str, name: str, arrays: Mapping, blocks: int, folder: Path, elements: int) -> int:
    """Run kernel `name` of `source` on `arrays`, by parameter, which it changes.

    Returns how often it multiplied fragments.

    Parameters
    ----------
    elements : int
        Of its pool in shared memory; another access than to these is found by chance alone.
    """
    match = re.search(
        rf'extern "C" __global__ void __launch_bounds__\((\d+)\) {name}\(([^)]*)\) {{.*?\n}}\n', source, re.S
    )
    threads, parameters = int(match[1]), re.findall(r"(\w+) ?\* __restrict__ (\w+)_ptr", match[2])
    pool = re.search(r"extern __shared__ __align__\(\d+\) half (\w+)\[\];", match[0])[1]
    arguments = ", ".join(f"({kind}*)a[{i}]" for i, (kind, _) in enumerate(parameters))
    names = {"threads": threads, "blocks": blocks, "name": name, "pool": pool, "elements": elements}
    code = SHIM + match[0] + MAIN.format(arguments=arguments, **names)
    (folder / "kernel.cc").write_text(code)
    library = folder / "kernel.so"
    flags = ["-std=c++20", "-O2", "-fno-strict-aliasing", "-w", "-shared", "-fPIC", "-pthread"]
    subprocess.run(["c++", *flags, str(folder / "kernel.cc"), "-o", str(library)], check=True)
    copies = {parameter: _copy_aligned(arrays[parameter]) for _, parameter in parameters}
    addresses = [copies[parameter].ctypes.data for _, parameter in parameters]
    kernel = ctypes.CDLL(str(library)).run
    kernel.restype = ctypes.c_int64
    multiplied = kernel((ctypes.c_void_p * len(addresses))(*addresses))
    for parameter, values in copies.items():
        arrays[parameter].reshape(-1)[:] = values
    return multiplied


def _copy_aligned(values: np.ndarray) -> np.ndarray:
    """A flat copy that begins where a GPU's allocations do: at a multiple of 256 bytes."""
    room = np.empty(values.nbytes + 256, np.uint8)
    begin = -room.ctypes.data % 256
    copy = room[begin : begin + values.nbytes].view(values.dtype)
    copy[:] = values.reshape(-1)
    return copy
