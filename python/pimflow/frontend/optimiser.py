"""ONNX Runtime's optimiser, which ends its process on some networks and so has one of its own.

The process serves further networks while they come, since it takes longer to start than to optimise a small
one, and ends when none has come for a while, or when ours ends.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import subprocess
import sys
import tempfile
import threading
from pathlib import Path

import onnx

_IDLE_SECONDS = 5
_SERVER = f"""
import select, sys, onnxruntime
options = onnxruntime.SessionOptions()
options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_ENABLE_BASIC
options.log_severity_level = 4
while select.select([sys.stdin], [], [], {_IDLE_SECONDS})[0]:
    folder = sys.stdin.readline().rstrip("\\n")
    if not folder:
        break
    options.optimized_model_filepath = folder + "/optimised.onnx"
    try:
        onnxruntime.InferenceSession(folder + "/model.onnx", options, ["CPUExecutionProvider"])
    except Exception:
        pass
    print("done", flush=True)
"""


class OptimiserProcess:
    """The process; it is started when it is needed, and again if it has ended or is another process's."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[str] | None = None
        self._owner = 0
        self._lock = threading.Lock()

    def optimise(self, folder: str) -> None:
        """Optimise ``model.onnx`` in a folder, to ``optimised.onnx``; which is missing if that fails."""
        with self._lock:
            # One that was idle may end just as it is asked.
            is_answered = self._is_running() and self._ask(folder)
            if not is_answered:
                self._start()
                self._ask(folder)

    def end(self) -> None:
        """End the process, if it is ours."""
        process, self._process = self._process, None
        if process is not None and self._owner == os.getpid():
            with contextlib.suppress(OSError):
                process.communicate()

    def _is_running(self) -> bool:
        return self._process is not None and self._owner == os.getpid() and self._process.poll() is None

    def _start(self) -> None:
        self.end()
        self._owner = os.getpid()
        self._process = subprocess.Popen(
            [sys.executable, "-c", _SERVER],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )

    def _ask(self, folder: str) -> bool:
        process = self._process
        assert process is not None and process.stdin is not None and process.stdout is not None
        try:
            process.stdin.write(folder + "\n")
            process.stdin.flush()
            return process.stdout.readline() != ""
        except OSError:
            return False


_OPTIMISER = OptimiserProcess()
atexit.register(_OPTIMISER.end)


def optimise(model: onnx.ModelProto) -> onnx.ModelProto | None:
    """Apply ONNX Runtime's basic optimisations; returns None if they fail."""
    with tempfile.TemporaryDirectory() as scratch:
        (Path(scratch) / "model.onnx").write_bytes(model.SerializeToString())
        _OPTIMISER.optimise(scratch)
        result = Path(scratch) / "optimised.onnx"
        return onnx.load(result) if result.exists() else None
