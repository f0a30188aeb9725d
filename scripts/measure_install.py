"""Size of the installation that README.md names, from a fresh clone: prints its sentence."""

import subprocess
import sys
import tempfile
from pathlib import Path

from update_readme import ROOT


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        clone, environment = Path(folder) / "pimflow", Path(folder) / "venv"
        subprocess.run(["git", "clone", "--quiet", ROOT, clone], check=True)
        subprocess.run([sys.executable, "-m", "venv", environment], check=True)
        pip = [environment / "bin" / "python", "-m", "pip", "install", "--quiet"]
        subprocess.run([*pip, "-e", ".[test]"], check=True, cwd=clone, stdout=subprocess.DEVNULL)
        files = [path for path in environment.rglob("*") if path.is_file() and not path.is_symlink()]
        size_mb = sum(path.stat().st_size for path in files) / 1e6
        print(f"The first takes {size_mb:.0f} MB of disk.")


if __name__ == "__main__":
    main()
