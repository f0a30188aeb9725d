"""Servers and trackers of TVM's RPC in processes of their own, on free ports of this machine."""

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass

# Serves until it is killed; its workers are of its process group.
CODE = """
import sys
from tvm import rpc
key, begin, tracked = sys.argv[1], int(sys.argv[2]), sys.argv[3] == "tracked"
ports, address = [], None
if tracked:
    from tvm.rpc.tracker import Tracker
    tracker = Tracker("127.0.0.1", begin, begin + 1000, silent=True)
    address = ("127.0.0.1", tracker.port)
server = rpc.Server("127.0.0.1", begin, begin + 1000, key=key, tracker_addr=address, silent=True)
print(tracker.port if tracked else server.port, flush=True)
sys.stdin.read()
"""


@dataclass
class RpcProcess:
    """A server, or a tracker with a server.

    Attributes
    ----------
    port : int
        Of the server; of the tracker where there is one.
    """

    port: int
    _process: subprocess.Popen

    def kill(self) -> None:
        """As when the machine loses its power: workers and connections too."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()


@contextlib.contextmanager
def server(key: str, *, tracked: bool = False) -> Iterator[RpcProcess]:
    """A server, or a tracker with a server that reports to it; both may start where ports are free."""
    arguments = [key, str(20000 + os.getpid() % 10000), "tracked" if tracked else ""]
    command = [sys.executable, "-c", CODE, *arguments]
    streams = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL}
    process = subprocess.Popen(command, **streams, text=True, start_new_session=True)
    rpc_process = RpcProcess(0, process)
    try:
        rpc_process.port = int(process.stdout.readline())
        yield rpc_process
    finally:
        rpc_process.kill()
