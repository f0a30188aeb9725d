"""Size and largest parts of the installation that README.md names, from a fresh clone: its sentence."""

import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path

from update_readme import ROOT

LARGEST = 4  # parts that are named
# By folder of site-packages; folders of one package are together.
NAMES = {"tvm": "TVM", "scipy": "SciPy", "onnxruntime": "ONNX Runtime", "numpy": "NumPy", "onnx": "ONNX"}


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        clone, environment = Path(folder) / "pimflow", Path(folder) / "venv"
        subprocess.run(["git", "clone", "--quiet", ROOT, clone], check=True)
        subprocess.run([sys.executable, "-m", "venv", environment], check=True)
        pip = [environment / "bin" / "python", "-m", "pip", "install", "--quiet"]
        subprocess.run([*pip, "-e", ".[test]"], check=True, cwd=clone, stdout=subprocess.DEVNULL)
        files = [path for path in environment.rglob("*") if path.is_file() and not path.is_symlink()]
        sizes_mb: Counter[str] = Counter()
        for path in files:
            _, _, inside = str(path).partition("/site-packages/")
            sizes_mb[inside.partition("/")[0].removesuffix(".libs")] += path.stat().st_size / 1e6
        size_mb = sum(sizes_mb.values())
        parts = [f"{NAMES.get(name, name)} {part_mb:.0f}" for name, part_mb in sizes_mb.most_common(LARGEST)]
        print(f"The first takes {size_mb:.0f} MB of disk: {', '.join(parts)} MB, and smaller packages.")


if __name__ == "__main__":
    main()
