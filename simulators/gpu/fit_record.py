"""Records of the rows that GPUs were fitted to, so that only other rows are scored.

A record is a text file: ``fitted/<GPU>.txt`` of an embedded GPU, ``<stem>.fitted.txt`` beside a file of
one's own. A line is the digest of a shape whose rows, on this GPU, some constant was fitted to; or
``as NAME``: other constants were taken from the embedded GPU NAME, which has a record too; or a comment,
which begins with ``#``. A record without digests says that nothing was fitted to rows of this GPU.
"""

from __future__ import annotations

import os
import re
import zlib
from collections.abc import Iterable
from pathlib import Path

from pimflow.errors import SpecError
from pimflow.hardware.gpu import GpuSpec
from pimflow.hardware.reader import spec_names
from pimflow.host.files import replace_file
from pimflow.simulators.gpu.samples import Sample, plain_name

FITTED = Path(__file__).parent / "fitted"
SUFFIX = ".fitted.txt"
_DIGEST = re.compile(r"[0-9a-f]{8}")
_AS = re.compile(r"as (\S+)")


def record_path(gpu: str | os.PathLike) -> Path:
    """Where the record of a GPU lies, which `gpu` names as `GpuSpec.load` takes it."""
    name = os.fspath(gpu)
    return FITTED / f"{name}.txt" if name in spec_names("gpu") else Path(gpu).with_suffix(SUFFIX)


def held_out(
    samples: Iterable[Sample], gpu: GpuSpec, record: str | os.PathLike | None = None
) -> list[Sample]:
    """Samples that no constant of `gpu` was fitted to.

    Those are the samples of shapes that are not on its record. Constants that were taken from another GPU
    were fitted to rows of that one: of these, samples that its record has are left out too. Rows of
    Accel-Sim that name no GPU are taken for such.

    Parameters
    ----------
    record : path, optional
        That of the embedded GPU of the same name by default.

    Raises
    ------
    SpecError
        If there is no record, it is malformed, or a GPU that it names has none.
    """
    record = FITTED / f"{gpu.name}.txt" if record is None else Path(record)
    digests, others = _read(record)
    inherited = _of_others(record, others)

    def seen(sample: Sample) -> bool:
        digest, named = shape_digest(sample), plain_name(sample.gpu)
        return digest in digests or any(
            digest in theirs and (named == plain_name(name) or (not named and sample.simulated))
            for name, theirs in inherited.items()
        )

    return [sample for sample in samples if not seen(sample)]


def write_fitted(record: str | os.PathLike, samples: Iterable[Sample]) -> None:
    """Add the shapes of `samples` to a record, which need not be there yet.

    Raises
    ------
    SpecError
        If what is there is malformed.
    OutputError
        If it cannot be written.
    """
    path = Path(record)
    kept = [line for line in _lines(path) if not _DIGEST.fullmatch(line)] if path.exists() else []
    known = _read(path)[0] if path.exists() else frozenset()
    digests = sorted(known | {shape_digest(sample) for sample in samples})
    replace_file(path, "\n".join([*kept, *digests, ""]).encode())


def shape_digest(sample: Sample) -> str:
    """Digest of a sample's shape in a record; for a run of Accel-Sim, of what it computes."""
    shape = sample.shape
    if sample.simulated:
        kernel = sample.kernel
        sizes = (kernel.m, kernel.n, kernel.k, kernel.input_bytes, kernel.output_bytes)
        shape = ",".join(map(str, (kernel.kind, *sizes, sample.tile)))
    return f"{zlib.crc32(shape.encode()):08x}"


def _of_others(record: Path, names: Iterable[str]) -> dict[str, frozenset[str]]:
    """By embedded GPU, the digests of its record: of `names`, and of those that their records name."""
    digests_of: dict[str, frozenset[str]] = {}
    waiting = [(record, name) for name in names]
    while waiting:
        path, name = waiting.pop()
        if name not in spec_names("gpu"):
            raise SpecError(f"{path}: 'as {name}': there is no embedded gpu of that name")
        if name not in digests_of:
            digests_of[name], more = _read(FITTED / f"{name}.txt")
            waiting += [(FITTED / f"{name}.txt", each) for each in more]
    return digests_of


def _read(path: Path) -> tuple[frozenset[str], tuple[str, ...]]:
    """The digests of a record, and the GPUs that it names."""
    digests, others = set(), []
    for number, line in enumerate(_lines(path), 1):
        if match := _AS.fullmatch(line):
            others.append(match[1])
        elif _DIGEST.fullmatch(line):
            digests.add(line)
        elif line and not line.startswith("#"):
            raise SpecError(f"{path}:{number}: neither a digest nor 'as NAME' nor a comment: {line[:40]!r}")
    return frozenset(digests), tuple(others)


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
