"""Time and size of the installation that README.md names, from a fresh clone: prints its sentence."""

import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from update_readme import ROOT


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        clone, environment = Path(folder) / "pimflow", Path(folder) / "venv"
        subprocess.run(["git", "clone", "--quiet", ROOT, clone], check=True)
        subprocess.run([sys.executable, "-m", "venv", environment], check=True)
        pip = [environment / "bin" / "python", "-m", "pip", "install", "--quiet"]
        begin = time.perf_counter()
        subprocess.run([*pip, "-e", ".[test]"], check=True, cwd=clone, stdout=subprocess.DEVNULL)
        minutes = (time.perf_counter() - begin) / 60
        files = [path for path in environment.rglob("*") if path.is_file() and not path.is_symlink()]
        size_mb = sum(path.stat().st_size for path in files) / 1e6
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
        took = f"{minutes:.0f} minutes on {cores} cores of a shared machine"
        print(f"The first takes {took}, and {size_mb:.0f} MB of disk.")


if __name__ == "__main__":
    main()
