"""Records of the measured rows to which GPUs were fitted, so that only unseen rows are scored.

A record is a text file: ``fitted/<GPU>.txt`` for an embedded GPU, ``<stem>.fitted.txt`` beside a user's GPU
file. A line is the digest of a shape: some constant was fitted to its rows on this GPU. Or it is ``as NAME``:
other constants were taken from the embedded GPU NAME, which has its own record. Or it is a comment, which
begins with ``#``. A record without digests says that nothing was fitted to rows of this GPU.
"""

from __future__ import annotations

import os
import re
import zlib
from collections.abc import Iterable
from pathlib import Path

from calibration.samples import Sample, plain_name
from pimflow.errors import SpecError
from pimflow.hardware.gpu import GpuSpec
from pimflow.hardware.reader import spec_names
from pimflow.host.files import replace_file

FITTED = Path(__file__).parent / "fitted"
SUFFIX = ".fitted.txt"
_DIGEST = re.compile(r"[0-9a-f]{8}")
_AS = re.compile(r"as (\S+)")


def record_path(gpu: str | os.PathLike[str]) -> Path:
    """Path of the record of a GPU; `gpu` is a name or a file, as `GpuSpec.load` takes it."""
    name = os.fspath(gpu)
    return FITTED / f"{name}.txt" if name in spec_names("gpu") else Path(gpu).with_suffix(SUFFIX)


def unseen_samples(
    samples: Iterable[Sample], gpu: GpuSpec, record: str | os.PathLike[str] | None = None
) -> list[Sample]:
    """Samples that no constant of `gpu` was fitted to.

    These are the samples of shapes that are not in its record. Constants that were taken from another GPU
    were fitted to rows of that GPU; so its rows are left out too, if their shapes are in that GPU's record.
    Rows of Accel-Sim that name no GPU count as such rows.

    Parameters
    ----------
    record : path, optional
        Path of the record; by default that of the embedded GPU with the same name.

    Raises
    ------
    SpecError
        If there is no record, it is malformed, or a GPU that it names has none.
    """
    record = FITTED / f"{gpu.name}.txt" if record is None else Path(record)
    digests, gpu_names = _read(record)
    inherited = _inherited_digests(record, gpu_names)

    def is_seen(sample: Sample) -> bool:
        """Whether the record, or that of a GPU from which this one inherits constants, has its shape."""
        digest, sample_gpu = shape_digest(sample), plain_name(sample.gpu)
        return digest in digests or any(
            digest in gpu_digests
            and (sample_gpu == plain_name(name) or (not sample_gpu and sample.is_simulated))
            for name, gpu_digests in inherited.items()
        )

    return [sample for sample in samples if not is_seen(sample)]


def record_samples(record: str | os.PathLike[str], samples: Iterable[Sample]) -> None:
    """Add the shapes of `samples` to a record, which need not exist yet.

    Raises
    ------
    SpecError
        If an existing record is malformed.
    OutputError
        If it cannot be written.
    """
    path = Path(record)
    other_lines = [line for line in _lines(path) if not _DIGEST.fullmatch(line)] if path.exists() else []
    old_digests = _read(path)[0] if path.exists() else frozenset()
    digests = sorted(old_digests | {shape_digest(sample) for sample in samples})
    replace_file(path, "\n".join([*other_lines, *digests, ""]).encode())


def shape_digest(sample: Sample) -> str:
    """Digest of a sample's shape in a record; for a run of Accel-Sim, of its kernel's sizes and tile."""
    shape = sample.shape
    if sample.is_simulated:
        kernel = sample.kernel
        sizes = (kernel.m, kernel.n, kernel.k, kernel.input_bytes, kernel.output_bytes)
        shape = ",".join(map(str, (kernel.kind, *sizes, sample.tile)))
    return f"{zlib.crc32(shape.encode()):08x}"


def _inherited_digests(record: Path, names: Iterable[str]) -> dict[str, frozenset[str]]:
    """Digests of the records of `names`, and of all GPUs that these records name, by embedded GPU."""
    digests: dict[str, frozenset[str]] = {}
    queue = [(record, name) for name in names]
    while queue:
        path, name = queue.pop()
        if name not in spec_names("gpu"):
            raise SpecError(f"{path}: 'as {name}': there is no embedded gpu of that name")
        if name not in digests:
            digests[name], gpu_names = _read(FITTED / f"{name}.txt")
            queue += [(FITTED / f"{name}.txt", gpu_name) for gpu_name in gpu_names]
    return digests


def _read(path: Path) -> tuple[frozenset[str], tuple[str, ...]]:
    """The digests of a record, and the GPUs that it names."""
    digests, gpu_names = set(), []
    for number, line in enumerate(_lines(path), 1):
        if match := _AS.fullmatch(line):
            gpu_names.append(match[1])
        elif _DIGEST.fullmatch(line):
            digests.add(line)
        elif line and not line.startswith("#"):
            raise SpecError(f"{path}:{number}: neither a digest nor 'as NAME' nor a comment: {line[:40]!r}")
    return frozenset(digests), tuple(gpu_names)


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text(encoding="utf-8").splitlines()
    except FileNotFoundError:
        raise SpecError(
            f"{path}: there is no record of the rows that this gpu was fitted to, so none is known to be "
            "unseen; fit it with scripts/fit_gpu_model.py, or score every row with --split all"
        ) from None
    except (OSError, UnicodeDecodeError) as error:
        raise SpecError(f"{path}: cannot be read: {getattr(error, 'strerror', None) or error}") from error
