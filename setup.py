"""Build of the C++ core against tvm-ffi, and the folders that make up the package."""

import os
from glob import glob

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

PACKAGES = {
    "pimflow": "python/pimflow",
    "pimflow.c_code": "python/pimflow/c_code",
    "pimflow.commands": "python/pimflow/commands",
    "pimflow.core": "python/pimflow/core",
    "pimflow.decomposed": "python/pimflow/decomposed",
    "pimflow.decomposition": "python/pimflow/decomposition",
    "pimflow.deep_fusion": "python/pimflow/deep_fusion",
    "pimflow.frontend": "python/pimflow/frontend",
    "pimflow.fused_execution": "python/pimflow/fused_execution",
    "pimflow.hardware": "python/pimflow/hardware",
    "pimflow.memory": "python/pimflow/memory",
    "pimflow.primitive_kernels": "python/pimflow/primitive_kernels",
    "pimflow.primitives": "python/pimflow/primitives",
    "pimflow.placement": "python/pimflow/placement",
    "pimflow.primitive_profiles": "python/pimflow/primitive_profiles",
    "pimflow.published": "python/pimflow/published",
    "pimflow.relay": "python/pimflow/relay",
    "pimflow.zoo": "python/pimflow/zoo",
    "pimflow.relay_passes": "relay_passes",
    "pimflow.pim_backend": "pim_backend",
    "pimflow.simulators": "simulators",
}


SOURCES = ("simulators/src", "pim_backend/src", "python/pimflow/memory/src")


class BuildCore(build_ext):
    """A plain shared library, not a Python module: tvm-ffi loads it and finds what it registers."""

    def get_ext_filename(self, fullname):
        return os.path.join(*fullname.split(".")) + ".so"

    def get_export_symbols(self, ext):
        return []

    def build_extension(self, ext):
        from tvm_ffi import libinfo

        ext.include_dirs += [libinfo.find_include_path(), libinfo.find_dlpack_include_path()]
        ext.library_dirs.append(os.path.dirname(libinfo.find_libtvm_ffi()))
        super().build_extension(ext)


setup(
    packages=list(PACKAGES),
    package_dir=PACKAGES,
    ext_modules=[
        Extension(
            "pimflow.libpimflow_core",
            sources=sorted(file for folder in SOURCES for file in glob(f"{folder}/*.cc")),
            depends=sorted(file for folder in SOURCES for file in glob(f"{folder}/*.h")),
            libraries=["tvm_ffi"],
            language="c++",
            # Results are bit-identical on every machine only if no product is contracted into an FMA.
            extra_compile_args=["-std=c++17", "-O3", "-ffp-contract=off", "-fvisibility=hidden"],
        )
    ],
    cmdclass={"build_ext": BuildCore},
)
