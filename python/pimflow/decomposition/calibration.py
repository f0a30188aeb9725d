"""Agreement of a decomposed network with the original, on samples of the user."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np

from pimflow.decomposition.network import DecomposedNetwork
from pimflow.decomposition.report import ClassAgreement, MapAgreement
from pimflow.errors import CalibrationError, hint
from pimflow.frontend import Network, relax_module
from pimflow.host.array_files import read_arrays

LABELS = "labels"
TOPS = (1, 5)  # how many of the classes with the highest scores count: top-1 and top-5

Data = str | os.PathLike | Mapping[str, np.ndarray]


@dataclass(frozen=True, kw_only=True)
class Calibration:
    """Samples for a network, checked against it.

    Attributes
    ----------
    inputs : dict of str to ndarray, [samples, ...]
        In the network's order and dtypes.
    labels : ndarray or None
        [samples] of classifiers, [samples, height, width] of maps.
    maps : bool
        Whether it gives every pixel a class ([batch, classes, height, width]), or only the whole sample.
    """

    inputs: dict[str, np.ndarray]
    labels: np.ndarray | None
    batch: int
    classes: int
    maps: bool

    @classmethod
    def read(cls, data: Data, network: Network) -> Calibration:
        """Read an ``.npz`` file, or take its arrays: one for each input, by name, and optionally ``labels``.

        Raises
        ------
        CalibrationError
            If it cannot be read, or does not match the network.
        """
        is_mapping = isinstance(data, Mapping)
        where = "calibration" if is_mapping else os.fspath(data)
        arrays = dict(data) if is_mapping else read_arrays(where, CalibrationError)
        classes, pixels = _output_classes(where, network)
        known_names = [*network.inputs, LABELS]
        for name in arrays:
            if name not in known_names:
                raise CalibrationError(f"{where}: no input '{name}'; {hint(name, known_names)}")
        inputs = {name: _samples(where, network, name, arrays) for name in network.inputs}
        counts = {name: len(array) for name, array in inputs.items()}
        first, samples = next(iter(counts.items()))
        for name, count in counts.items():
            if count != samples:
                raise CalibrationError(f"{where}: {count} samples of '{name}', {samples} of '{first}'")
        batch = network.inputs[first][0][0]
        if not samples or samples % batch:
            raise CalibrationError(
                f"{where}: {samples} samples; '{network.name}' takes {batch} at once: give a multiple of it"
            )
        labels = arrays.get(LABELS) if LABELS not in network.inputs else None
        if labels is not None:
            labels = _labels(where, labels, (samples, *pixels), max(classes, 2))
        return cls(inputs=inputs, labels=labels, batch=batch, classes=classes, maps=bool(pixels))

    @property
    def samples(self) -> int:
        return len(next(iter(self.inputs.values())))

    def batches(self) -> Iterator[tuple[dict[str, np.ndarray], np.ndarray | None]]:
        """Inputs and labels of one inference after another."""
        for begin in range(0, self.samples, self.batch):
            part = slice(begin, begin + self.batch)
            labels = None if self.labels is None else self.labels[part]
            yield {name: array[part] for name, array in self.inputs.items()}, labels


def agreement(data: Calibration, decomposed_network: DecomposedNetwork) -> ClassAgreement | MapAgreement:
    """Compare the decomposed network with the original on `data`, for a report.

    Both are run by their references, in fp32. Compiled code is verified against the decomposed network's.
    """
    networks = decomposed_network.original, decomposed_network.network
    original, decomposed = (network.reference.prepared() for network in networks)
    tally = _MapTally(data.classes) if data.maps else _ClassTally()
    max_values = [0.0, 0.0]  # of differences, and of the original's outputs
    for inputs, labels in data.batches():
        shape = (data.batch, data.classes, *([-1] if data.maps else []))
        original_scores, decomposed_scores = (run(inputs)[0].reshape(shape) for run in (original, decomposed))
        batch_values = (
            np.abs(decomposed_scores.astype(np.float64) - original_scores).max(),
            np.abs(original_scores).max(),
        )
        max_values = [max(previous, float(value)) for previous, value in zip(max_values, batch_values)]
        tally.add(
            original_scores, decomposed_scores, None if labels is None else labels.reshape(data.batch, -1)
        )
    shares = tally.summary(data.labels is not None)
    difference = max_values[0] / (max_values[1] or 1.0)
    return (MapAgreement if data.maps else ClassAgreement)(
        samples=data.samples, max_relative_difference=difference, **shares
    )


def _output_classes(where: str, network: Network) -> tuple[int, tuple[int, ...]]:
    """Number of classes, and height and width if the output is a map."""
    shapes = relax_module.output_shapes(network.module)
    shape = shapes[0] if len(shapes) == 1 else ()
    batches = {dims[:1] for dims, _ in network.inputs.values()}
    if len(shape) not in (2, 4) or batches != {shape[:1]}:
        found_outputs = (
            f"{len(shapes)} outputs" if len(shapes) > 1 else f"an output of shape {list(shapes[0])}"
        )
        raise CalibrationError(
            f"{where}: '{network.name}' has {found_outputs}: calibration takes one, [N, classes] or "
            "[N, classes, height, width], with N first in all inputs"
        )
    pixels = tuple(shape[2:])
    return shape[1], () if pixels == (1, 1) else pixels


def _samples(where: str, network: Network, name: str, arrays: Mapping[str, np.ndarray]) -> np.ndarray:
    (_, *dims), dtype = network.inputs[name]
    if name not in arrays:
        raise CalibrationError(f"{where}: input '{name}' is missing; {_input_advice(name, dims, dtype)}")
    array = np.asarray(arrays[name])
    if array.dtype.kind not in "biuf" or list(array.shape[1:]) != dims or not array.ndim:
        raise CalibrationError(
            f"{where}: '{name}' has shape {list(array.shape)} and dtype {array.dtype}; "
            f"{_input_advice(name, dims, dtype)}"
        )
    if not np.isfinite(array).all():
        raise CalibrationError(f"{where}: '{name}' has values that are no finite numbers")
    rows = network.table_rows.get(name)
    if rows and array.size and not 0 <= array.min() <= array.max() < rows:
        raise CalibrationError(f"{where}: '{name}' picks rows of a table: give 0 to {rows - 1}")
    return array.astype(dtype)


def _input_advice(name: str, dims: list[int], dtype: str) -> str:
    return f"give '{name}' as {dtype} of shape [samples, {', '.join(map(str, dims))}]"


def _labels(where: str, labels: np.ndarray, shape: tuple[int, ...], classes: int) -> np.ndarray:
    labels = np.asarray(labels)
    if labels.dtype.kind not in "iu" or labels.shape != shape:
        raise CalibrationError(
            f"{where}: '{LABELS}' has shape {list(labels.shape)} and dtype {labels.dtype}; give integers of "
            f"shape {list(shape)}"
        )
    if not 0 <= labels.min() <= labels.max() < classes:
        raise CalibrationError(
            f"{where}: '{LABELS}' are {labels.min()} to {labels.max()}; the classes are 0 to {classes - 1}"
        )
    return labels.astype(np.int64)


class _ClassTally:
    """Counts agreement and accuracy over samples [n, classes]."""

    def __init__(self) -> None:
        self.samples = 0
        # for top-1 and top-5
        self.hits = dict.fromkeys(("agreement", "accuracy", "accuracy_original"), np.zeros(2, np.int64))

    def add(self, original: np.ndarray, decomposed: np.ndarray, labels: np.ndarray | None) -> None:
        """Count the scores of a batch, [n, classes]; labels are [n, 1]."""
        self.samples += len(original)
        self._count("agreement", decomposed, _order(original)[:, 0])
        if labels is not None:
            self._count("accuracy", decomposed, labels[:, 0])
            self._count("accuracy_original", original, labels[:, 0])

    def _count(self, name: str, scores: np.ndarray, expected: np.ndarray) -> None:
        hits = _order(scores) == expected[:, None]
        self.hits[name] = self.hits[name] + [hits[:, :top].sum() for top in TOPS]

    def summary(self, labelled: bool) -> dict[str, float | None]:
        """Shares of the samples, by field of `ClassAgreement`; accuracies are None without labels."""
        return {
            f"top{top}_{name}": int(hits[i]) / self.samples if labelled or name == "agreement" else None
            for name, hits in self.hits.items()
            for i, top in enumerate(TOPS)
        }


def _order(scores: np.ndarray) -> np.ndarray:
    """Classes by falling score; of equal scores the lower class comes first."""
    return np.argsort(-scores, axis=1, kind="stable")


class _MapTally:
    """Counts agreement over pixels of maps [n, classes, pixels].

    With one channel, a pixel is foreground if its score is above 1/2, where all scores of the original are in
    [0, 1]; otherwise, if it is above 0. Both are counted, since the range is known only at the end.
    """

    def __init__(self, classes: int) -> None:
        self.thresholds = (0.5, 0.0) if classes == 1 else (None,)
        self.classes, self.in_unit_range = max(classes, 2), True
        pairs = ("dice", "dice_to_labels", "dice_to_labels_original")
        self.counts = {
            (name, threshold): np.zeros((2, self.classes)) for name in pairs for threshold in self.thresholds
        }

    def add(self, original: np.ndarray, decomposed: np.ndarray, labels: np.ndarray | None) -> None:
        """Count the scores of a batch, [n, classes, pixels]; labels are [n, pixels]."""
        self.in_unit_range = self.in_unit_range and bool(original.min() >= 0 and original.max() <= 1)
        for threshold in self.thresholds:
            original_classes, decomposed_classes = (
                _pixel_classes(scores, threshold) for scores in (original, decomposed)
            )
            self._count("dice", threshold, decomposed_classes, original_classes)
            if labels is not None:
                self._count("dice_to_labels", threshold, decomposed_classes, labels)
                self._count("dice_to_labels_original", threshold, original_classes, labels)

    def _count(self, name: str, threshold: float | None, a: np.ndarray, b: np.ndarray) -> None:
        sizes = [np.bincount(x.ravel(), minlength=self.classes) for x in (a[a == b], a, b)]
        self.counts[name, threshold] += np.stack([2 * sizes[0], sizes[1] + sizes[2]])

    def summary(self, labelled: bool) -> dict[str, float | None]:
        """Dice coefficients, by field of `MapAgreement`; those to labels are None without labels."""
        threshold = self.thresholds[0 if self.in_unit_range else -1]
        first = 0 if threshold is None else 1  # with one channel, the background does not count
        return {
            name: _dice(*counts[:, first:]) if labelled or name == "dice" else None
            for (name, map_threshold), counts in self.counts.items()
            if map_threshold == threshold
        }


def _pixel_classes(scores: np.ndarray, threshold: float | None) -> np.ndarray:
    return scores.argmax(axis=1) if threshold is None else (scores[:, 0] > threshold).astype(np.int64)


def _dice(overlaps: np.ndarray, sizes: np.ndarray) -> float:
    present = sizes > 0
    return float(np.mean(overlaps[present] / sizes[present])) if present.any() else 1.0
