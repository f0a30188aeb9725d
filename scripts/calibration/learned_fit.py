"""Fits the learned GPU model to the errors of the analytic model."""

from __future__ import annotations

import json
import lzma
import os
from collections.abc import Sequence
from typing import Any

import numpy as np
import xgboost

from calibration.gpu_fit import sample_groups
from calibration.samples import Sample
from pimflow.errors import SpecError
from pimflow.hardware.gpu import GpuSpec
from pimflow.host.files import replace_file
from pimflow.simulators.gpu.learned_model import (
    FEATURES,
    ResidualModel,
    constants_digest,
    features,
    residual_class,
    residual_path,
)
from pimflow.simulators.gpu.machine import has_rate

TREES = 200
FOLDS = 5
PARAMETERS = {
    "objective": "reg:pseudohubererror",
    "huber_slope": 0.2,  # log error beyond which a sample counts linearly
    "base_score": 0.0,
    "max_depth": 7,
    "learning_rate": 0.06,
    "subsample": 0.8,
    "colsample_bytree": 0.5,
    "min_child_weight": 2,
    "tree_method": "hist",
    "max_bin": 256,
    "seed": 0,
    "monotone_constraints": tuple(int(name == "epilogue_reads") for name in FEATURES),
}


def learn(gpu: GpuSpec, samples: Sequence[Sample], source: str) -> ResidualModel:
    """The residual of `gpu` on `samples` of one dtype, which should be samples to fit to
    (`Sample.is_fit_sample`).

    Cross-validation over shapes decides for which classes of convolutions it is used.
    """
    table, residual, used_samples = _training_table(gpu, samples)
    folds = _folds(used_samples)
    predicted = np.empty_like(residual)
    for fold in range(FOLDS):
        is_test = folds == fold
        booster = _train(table[~is_test], residual[~is_test])
        predicted[is_test] = booster.inplace_predict(table[is_test])
    about = {
        "gpu": gpu.name,
        "dtype": used_samples[0].dtype,
        "constants": constants_digest(gpu),
        "launch_ns": gpu.launch_ns,
        "source": source,
        "classes": _errors(used_samples, residual, predicted),
    }
    booster = _train(table, residual)
    booster.set_attr(about=json.dumps(about, sort_keys=True))
    return ResidualModel(booster, about)


def learn_dtypes(
    gpu: GpuSpec, samples: Sequence[Sample], data: str, write: bool = False
) -> list[ResidualModel]:
    """The residual of `gpu` for each dtype of `samples`, rows of the file `data`; stored if `write`."""
    residuals = []
    for dtype in sorted({sample.dtype for sample in samples if has_rate(gpu, sample.dtype)}):
        rows = [sample for sample in samples if sample.dtype == dtype]
        source = (
            f"scripts/fit_gpu_model.py --learned, {len(rows)} rows of {data} (half of its shapes, by hash)"
        )
        residual = learn(gpu, rows, source)
        if write:
            write_residual(residual_path(gpu.name, dtype), residual)
        residuals.append(residual)
    return residuals


def _training_table(gpu: GpuSpec, samples: Sequence[Sample]) -> tuple[np.ndarray, np.ndarray, list[Sample]]:
    tables: list[np.ndarray] = []
    residuals: list[np.ndarray] = []
    used_samples: list[Sample] = []
    for members in sample_groups(s for s in samples if s.kernel.geometry is not None and s.channels is None):
        kernels = [sample.kernel for sample in members.samples]
        tables.append(features(kernels, gpu, members.dtype))
        residuals.append(-members.log_errors(gpu))
        used_samples += members.samples
    if not used_samples:
        raise SpecError(f"gpu '{gpu.name}': no convolutions to learn from")
    return np.vstack(tables), np.concatenate(residuals), used_samples


def _folds(samples: Sequence[Sample]) -> np.ndarray:
    """A fold for each sample; all samples of a shape are in one."""
    shapes = {shape: i % FOLDS for i, shape in enumerate(sorted({sample.shape for sample in samples}))}
    return np.array([shapes[sample.shape] for sample in samples])


def _train(table: np.ndarray, residual: np.ndarray) -> xgboost.Booster:
    data = xgboost.DMatrix(table, residual, feature_names=list(FEATURES))
    booster = xgboost.train(PARAMETERS, data, TREES)
    booster.feature_names = None  # predictions are made from plain arrays
    return booster


def _errors(samples: Sequence[Sample], residual: np.ndarray, predicted: np.ndarray) -> dict[str, Any]:
    geometries = (sample.kernel.geometry for sample in samples)
    classes = np.array([residual_class(geometry) for geometry in geometries if geometry])
    analytic = np.abs(np.expm1(-residual))
    learned = np.abs(np.expm1(predicted - residual))
    return {
        str(name): {
            "rows": int((classes == name).sum()),
            "analytic": round(float(np.median(analytic[classes == name])), 4),
            "learned": round(float(np.median(learned[classes == name])), 4),
        }
        for name in sorted(set(classes))
    }


def write_residual(path: str | os.PathLike[str], residual: ResidualModel) -> None:
    """Write a learned model; the file is replaced at once, or not at all.

    Raises
    ------
    OutputError
        If the file cannot be written.
    """
    replace_file(path, lzma.compress(bytes(residual.booster.save_raw("ubj"))))
