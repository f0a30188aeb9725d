#!/usr/bin/env bash
# The tests of the C++ core under the address and undefined-behaviour sanitizers of GCC.
# It builds the library once more, in a temporary folder; nothing of it stays. Arguments go to pytest.
#
#     scripts/sanitize.sh [--corpus | --update PAGE] [pytest arguments]
#
# `--corpus` has what `.ci/run` takes the time for: what C++ reads of files, and mutants of these.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

page= level=-O1
if [ "${1:-}" = --update ]; then
    page=$2
    shift 2
fi
# What calls the library. Of the tests from `test_latches` on TVM calls it: runtime modules, options of passes,
# and callbacks into Python.
tests=(
    tests/function/test_{attention_programs,cache_schedule,coverage,every_device,executor,function,grouped_layers}.py
    tests/function/test_{cache_places,mutation,program,writes}.py
    tests/timing
    tests/memory/test_{planners,reorder}.py
    tests/function/test_{latches,conditioning,runtime}.py
    tests/e2e/test_{cache_in_pim,relay}.py tests/language/test_generate.py
    --deselect tests/e2e/test_relay.py::test_cuda_builds_anywhere  # nvcc does not run with what is preloaded
)
if [ "${1:-}" = --corpus ]; then
    tests=(
        "tests/fuzz/test_corpus.py::test_mutants[.pim]"
        "tests/fuzz/test_corpus.py::test_mutants[.pimprog]"
        tests/fuzz/test_native_readers.py
        --deselect tests/fuzz/test_native_readers.py::test_ten_million_commands  # takes longer than its bound
        tests/timing/test_trace_formats.py
        tests/function/test_program.py
    )
    shift
    level=-O0 # to compile takes longer than these tests
fi
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
# Level 3 takes four times as long to compile under them as level 1, and the tests a tenth less; level 0, half as long.
flags="-fsanitize=address,undefined -fno-sanitize-recover=undefined -fno-omit-frame-pointer -g1 $level"
CFLAGS=$flags CXXFLAGS=$flags LDFLAGS="-fsanitize=address,undefined" \
    python setup.py --quiet build_ext --build-temp "$work/objects" --build-lib "$work/lib"

cat > "$work/run.py" <<'PYTHON'
"""pytest with the library of the first argument."""
import sys
from pathlib import Path

import pytest

from pimflow.host import native

native.LIBRARY = Path(sys.argv[1])
code = pytest.main(sys.argv[2:])
assert native.load.cache_info().currsize == 1, "no test called the library"
sys.exit(code)
PYTHON
# Python itself is not instrumented: the runtimes come first, with what throws exceptions; its leaks are not ours.
runtimes=$(gcc -print-file-name=libasan.so):$(gcc -print-file-name=libubsan.so):$(gcc -print-file-name=libstdc++.so.6)
begin=$(date +%s)
# pytest would swallow a report with the process: it goes to a file.
report() { cat "$work"/report.* >&2 2>/dev/null || true; }
LD_PRELOAD=$runtimes ASAN_OPTIONS=detect_leaks=0:log_path="$work/report" \
    UBSAN_OPTIONS=print_stacktrace=1:log_path="$work/report" \
    python "$work/run.py" "$work/lib/pimflow/libpimflow_core.so" -o addopts= -m "not long" -p no:cacheprovider -p no:xdist \
    "${tests[@]}" "$@" | tee "$work/log" || { report; exit 1; }

if [ -n "$page" ]; then
    result=$(tail -1 "$work/log" | grep -o '[0-9]* passed')
    python - "$page" "$(date -u +%F)" "$(g++ --version | head -1)" "$result" "$(($(date +%s) - begin))" <<'PYTHON'
import sys

sys.path.insert(0, "scripts")
from update_readme import fill

page, day, compiler, result, seconds = sys.argv[1:]
with open(page, encoding="utf-8") as file:
    text = file.read()
table = [
    "| last run | compiler | tests | result | seconds |",
    "|---|---|---|---|---|",
    f"| {day} | {compiler} | `tests/timing`, of the others what calls the core | {result}, "
    f"no report | {seconds} |",
]
with open(page, "w", encoding="utf-8") as file:
    file.write(fill(text, "sanitizers", "\n".join(table)))
PYTHON
fi
