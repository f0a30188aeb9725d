#!/usr/bin/env bash
# The tests of the C++ core under the address and undefined-behaviour sanitizers of GCC.
# It builds the library once more, in a temporary folder; nothing of it stays. Arguments go to pytest.
#
#     scripts/sanitize.sh [--update PAGE] [pytest arguments]
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

page=
if [ "${1:-}" = --update ]; then
    page=$2
    shift 2
fi
tests=(
    tests/function/test_function.py tests/function/test_program.py tests/function/test_executor.py
    tests/function/test_mutation.py tests/function/test_every_device.py
    tests/timing tests/memory/test_planners.py tests/memory/test_reorder.py
)
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
flags="-fsanitize=address,undefined -fno-sanitize-recover=undefined -fno-omit-frame-pointer -g -O1"
CFLAGS=$flags CXXFLAGS=$flags LDFLAGS="-fsanitize=address,undefined" \
    python setup.py --quiet build_ext --build-temp "$work/objects" --build-lib "$work/lib"

cat > "$work/run.py" <<'PYTHON'
"""pytest with the library of the first argument."""
import sys
from pathlib import Path

import pytest

from pimflow.host import native

native.LIBRARY = Path(sys.argv[1])
sys.exit(pytest.main(sys.argv[2:]))
PYTHON
# Python itself is not instrumented: the runtimes come first, with what throws exceptions; its leaks are not ours.
runtimes=$(gcc -print-file-name=libasan.so):$(gcc -print-file-name=libubsan.so):$(gcc -print-file-name=libstdc++.so.6)
LD_PRELOAD=$runtimes ASAN_OPTIONS=detect_leaks=0 UBSAN_OPTIONS=print_stacktrace=1 \
    python "$work/run.py" "$work/lib/pimflow/libpimflow_core.so" -p no:cacheprovider "${tests[@]}" "$@" \
    | tee "$work/log"

if [ -n "$page" ]; then
    python - "$page" "$(tail -1 "$work/log") by $(gcc --version | head -1)" <<'PYTHON'
import sys

sys.path.insert(0, "scripts")
from update_readme import fill

page, line = sys.argv[1:]
with open(page, encoding="utf-8") as file:
    text = fill(file.read(), "sanitizers", f"Last run: {line}.")
with open(page, "w", encoding="utf-8") as file:
    file.write(text)
PYTHON
fi
