"""Build of the C++ core against tvm-ffi, and the folders that make up the package."""

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from glob import glob
from itertools import groupby
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

# The package consists of four folders of the repository.
FOLDERS = {
    "pimflow": "python/pimflow",
    "pimflow.relay_passes": "relay_passes",
    "pimflow.pim_backend": "pim_backend",
    "pimflow.simulators": "simulators",
}
SOURCES = (
    *("simulators/src", "pim_backend/src"),
    *(f"python/pimflow/{room}/src" for room in ("host", "memory", "placement")),
)


def packages() -> list[str]:
    """Dotted names of all folders below `FOLDERS` with an ``__init__.py``."""
    return sorted(
        ".".join((name, *path.parent.relative_to(folder).parts))
        for name, folder in FOLDERS.items()
        for path in Path(folder).rglob("__init__.py")
    )


def default_flags() -> tuple[str, ...]:
    """Optimisation without debugging information, each unless ``CXXFLAGS`` says otherwise.

    Python's own flags bring ``-g``, which makes the library twenty times as large.
    """
    given = os.environ.get("CXXFLAGS", "").split()
    return tuple(flag for flag in ("-O3", "-g0") if not any(word.startswith(flag[:2]) for word in given))


def joined_sources(sources: list[str], target: Path) -> list[str]:
    """Files in `target` that include all sources of a folder each; they are touched only if one is new."""
    target.mkdir(parents=True, exist_ok=True)
    joined = []
    for folder, files in groupby(sorted(sources), key=os.path.dirname):
        path = target / f"{folder.replace('/', '_')}.cc"
        text = "".join(f'#include "{Path(file).resolve()}"\n' for file in files)
        if not path.exists() or path.read_text(encoding="utf-8") != text:
            path.write_text(text, encoding="utf-8")
        joined.append(str(path))
    return joined


def parallel(compile_files: Callable[..., list[str]]) -> Callable[..., list[str]]:
    """`compile_files` of a setuptools compiler, parallel over files on all cores."""

    def compile_all(sources: list[str], *arguments: object, **options: object) -> list[str]:
        """Compile all sources; returns their object files."""
        with ThreadPoolExecutor(os.cpu_count()) as pool:
            results = pool.map(lambda source: compile_files([source], *arguments, **options), sources)
            return [compiled for objects in results for compiled in objects]

    return compile_all


class BuildCore(build_ext):
    """Builds a plain shared library, not a Python module: tvm-ffi loads it."""

    def get_ext_filename(self, fullname: str) -> str:
        """File name without the suffix of a Python version."""
        return os.path.join(*fullname.split(".")) + ".so"

    def get_export_symbols(self, ext: Extension) -> list[str]:
        """None: there is no Python module."""
        return []

    def build_extension(self, ext: Extension) -> None:
        """Build against tvm-ffi, a file for each folder of sources, on all cores.

        Most of the time goes to tvm-ffi's headers and templates, which files that are compiled as one share.
        """
        from tvm_ffi import libinfo

        ext.depends += ext.sources
        ext.sources = joined_sources(ext.sources, Path(self.build_temp))
        # As system headers, without warnings: in `.ci/run`, warnings of our headers stop the build.
        for folder in (libinfo.find_include_path(), libinfo.find_dlpack_include_path()):
            ext.extra_compile_args += ["-isystem", folder]
        ext.library_dirs.append(os.path.dirname(libinfo.find_libtvm_ffi()))
        self.compiler.compile = parallel(self.compiler.compile)
        super().build_extension(ext)


setup(
    packages=packages(),
    package_dir=FOLDERS | {"": "python"},
    py_modules=["pimflow_command", "pimflow_signals"],
    ext_modules=[
        Extension(
            "pimflow.libpimflow_core",
            sources=sorted(file for folder in SOURCES for file in glob(f"{folder}/*.cc")),
            depends=sorted(file for folder in SOURCES for file in glob(f"{folder}/*.h")),
            libraries=["tvm_ffi"],
            language="c++",
            # Results are bit-identical on every machine only if no product is contracted into an FMA.
            extra_compile_args=["-std=c++17", *default_flags(), "-ffp-contract=off", "-fvisibility=hidden"],
        )
    ],
    cmdclass={"build_ext": BuildCore},
)
