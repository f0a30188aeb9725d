"""Accuracy of the GPU model on Accel-Sim's cycles of kernels that it was not fitted to."""

from __future__ import annotations

import re
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from calibration.gpu_fit import EMITTED_CONSTANTS, fit
from calibration.samples import Sample, analytic_ns, validate
from pimflow.errors import TraceError
from pimflow.hardware.gpu import GpuSpec
from pimflow.simulators.gpu.model import kernel_cost

COMPARED_CHANNELS = (16, 32)  # memory channels whose times are compared
BEGIN, END = "<!-- accel-sim begin -->", "<!-- accel-sim end -->"


@dataclass(frozen=True, kw_only=True)
class HeldOutKernel:
    """A kernel that is predicted with constants fitted to all other kernels.

    Attributes
    ----------
    cycles : dict of int to (int, float)
        By number of memory channels, simulated and predicted cycles, launch included.
    """

    kernel: str
    cycles: dict[int, tuple[int, float]]

    @property
    def errors(self) -> dict[int, float]:
        """Relative errors by memory channels: predicted over simulated cycles, less 1."""
        return {channels: predicted / actual - 1 for channels, (actual, predicted) in self.cycles.items()}

    @property
    def ratio_error(self) -> float | None:
        """Relative error of the ratio of times with 16 and 32 channels; None where one was not simulated."""
        if not set(COMPARED_CHANNELS) <= set(self.cycles):
            return None
        (half, predicted_half), (full, predicted_full) = (self.cycles[count] for count in COMPARED_CHANNELS)
        return predicted_half / predicted_full / (half / full) - 1


def leave_one_out(
    samples: Sequence[Sample],
    gpu: GpuSpec,
    progress: Callable[[float], None] = lambda _: None,
    extra_samples: Sequence[Sample] = (),
) -> list[HeldOutKernel]:
    """For each kernel: fit to all others and to `extra_samples`, and predict it for all its channel
    counts.
    """
    kernels = sorted({sample.shape for sample in samples})
    held_out_kernels = []
    for index, kernel in enumerate(kernels):
        progress(index / len(kernels))
        fitted = fit(gpu, [*(sample for sample in samples if sample.shape != kernel), *extra_samples])
        cycles = {}
        for sample in samples:
            if sample.shape == kernel:
                channels = sample.channels or gpu.memory_channels
                predicted = kernel_cost(
                    sample.kernel, fitted, dtype=sample.dtype, channels=channels, tile=sample.tile
                )
                to_cycles = gpu.clock_mhz / 1e3
                cycles[channels] = (round(sample.measured_ns * to_cycles), predicted.total_ns * to_cycles)
        held_out_kernels.append(HeldOutKernel(kernel=kernel, cycles=dict(sorted(cycles.items()))))
    progress(1.0)
    return held_out_kernels


def ratio_errors(samples: Sequence[Sample], gpu: GpuSpec) -> list[float]:
    """Relative errors of the ratio of times with 16 and 32 channels, of kernels that ran with both."""
    by_shape: dict[str, dict[int, tuple[float, float]]] = {}
    for sample, total_ns in zip(samples, analytic_ns(samples, gpu)):
        by_shape.setdefault(sample.shape, {})[sample.channels or 0] = (sample.measured_ns, total_ns)
    errors = []
    for times in by_shape.values():
        if set(COMPARED_CHANNELS) <= set(times):
            (half, predicted_half), (full, predicted_full) = (times[count] for count in COMPARED_CHANNELS)
            errors.append(predicted_half / predicted_full / (half / full) - 1)
    return errors


def half_split_table(
    samples: Sequence[Sample],
    gpu: GpuSpec,
    extra_samples: Sequence[Sample] = (),
    unseen: Sequence[Sample] = (),
) -> tuple[str, GpuSpec]:
    """Accuracy on one half of the kernels of constants fitted to the other half and to `extra_samples`.

    All runs of a kernel are in the same half. `unseen` gets a table of its own.

    Returns
    -------
    str, GpuSpec
        Markdown tables, and `gpu` with those constants.
    """
    fit_samples = [
        *(sample for sample in samples if sample.is_fit_sample),
        *(sample for sample in extra_samples if sample.tile),
    ]
    fitted = fit(gpu, fit_samples)
    test_samples = [sample for sample in samples if not sample.is_fit_sample]
    parts = [
        f"The other half, {len(test_samples)} of {len(samples)} runs:",
        _accuracy_table(test_samples, fitted),
    ]
    if unseen:
        parts += [f"Kernels that nobody had seen, {len(unseen)} runs:", _accuracy_table(unseen, fitted)]
    constants = (f"`{key}` {fitted.efficiency[key]:g}" for key in sorted(EMITTED_CONSTANTS))
    parts.append(f"Fitted to {len(fit_samples)} runs: {', '.join(constants)}.")
    return "\n\n".join(parts), fitted


def _accuracy_table(samples: Sequence[Sample], gpu: GpuSpec) -> str:
    """Markdown: errors of `gpu` on some samples by class, and errors of the ratio of channels."""
    lines = ["| class | rows | median | bias | τ | largest |", "|---|---:|" + "---:|" * 4]
    for name, accuracy in validate(samples, gpu)["fp16"].items():
        tau = "" if accuracy["kendall_tau"] is None else f"{accuracy['kendall_tau']:.3f}"
        errors = (
            f"{accuracy['median_ape']:.1%} | {accuracy['bias']:+.1%} | {tau} | {accuracy['largest_ape']:.1%}"
        )
        lines.append(f"| {name} | {accuracy['count']} | {errors} |")
    ratios = [abs(error) for error in ratio_errors(samples, gpu)]
    share_within = sum(error <= 0.05 for error in ratios) / len(ratios)
    channels = " to ".join(map(str, COMPARED_CHANNELS))
    ratio_summary = (
        f"median {statistics.median(ratios):.1%}, largest {max(ratios):.1%}, {share_within:.0%} within 5 %"
    )
    shares = {1.0: "as large", 0.75: "three quarters of that", 0.5: "half of that"}
    taus = ", ".join(f"{label} {permutation_tau(samples, gpu, share):.3f}" for share, label in shares.items())
    lines += ["", f"Error of the ratio of {channels} channels: {ratio_summary}."]
    return "\n".join([*lines, f"τ of errors that hit any kernel: {taus}."])


def permutation_tau(samples: Sequence[Sample], gpu: GpuSpec, share: float, draws: int = 200) -> float:
    """Mean rank correlation if the errors of `gpu`, times `share`, are permuted randomly among the samples.

    It shows how well errors of that size keep the order of these kernels, whatever causes the errors.
    """
    import numpy as np  # with scipy, half a second
    from scipy.stats import kendalltau

    actual = np.array([sample.measured_ns for sample in samples])
    errors = share * (np.array(analytic_ns(samples, gpu)) / actual - 1)
    orders = (np.random.default_rng(number).permutation(errors) for number in range(draws))
    return float(np.mean([kendalltau(actual, actual * (1 + order)).statistic for order in orders]))


def summary(kernels: Sequence[HeldOutKernel]) -> dict[str, Any]:
    """Counts, ``mape`` over all rows, ``largest_ape`` and ``largest_ratio_error``; errors are fractions."""
    errors = [abs(error) for kernel in kernels for error in kernel.errors.values()]
    ratios = [abs(kernel.ratio_error) for kernel in kernels if kernel.ratio_error is not None]
    return {
        "kernels": len(kernels),
        "rows": len(errors),
        "mape": statistics.fmean(errors),
        "largest_ape": max(errors),
        "largest_ratio_error": max(ratios, default=None),
    }


def as_json(kernels: Sequence[HeldOutKernel]) -> dict[str, Any]:
    """`summary` and the predictions of all kernels, as JSON values."""
    rows = [
        {
            "kernel": kernel.kernel,
            "channels": channels,
            "simulated_cycles": actual,
            "predicted_cycles": round(predicted),
            "error": kernel.errors[channels],
        }
        for kernel in kernels
        for channels, (actual, predicted) in kernel.cycles.items()
    ]
    return {**summary(kernels), "predictions": rows}


def table(kernels: Sequence[HeldOutKernel]) -> str:
    """A Markdown table of the kernels, and a summary."""
    counts = sorted({channels for kernel in kernels for channels in kernel.cycles})
    head = [
        "kernel",
        *(f"{count} channels" for count in counts),
        f"{COMPARED_CHANNELS[0]} / {COMPARED_CHANNELS[1]}",
    ]
    lines = [_row(head), _row(["---", *["---:"] * (len(head) - 1)])]
    for kernel in kernels:
        cells = [
            f"{kernel.cycles[count][0]:,} ({kernel.errors[count]:+.1%})" if count in kernel.cycles else ""
            for count in counts
        ]
        ratio = kernel.ratio_error
        lines.append(_row([f"`{kernel.kernel}`", *cells, "" if ratio is None else f"{ratio:+.1%}"]))
    totals = summary(kernels)
    ratio = totals["largest_ratio_error"]
    lines += [
        "",
        f"{totals['kernels']} kernels, {totals['rows']} runs: mean absolute error "
        f"{totals['mape']:.1%}, largest {totals['largest_ape']:.1%}"
        + (
            f"; largest error of the ratio of {COMPARED_CHANNELS[0]} to {COMPARED_CHANNELS[1]} channels "
            f"{ratio:.1%}."
            if ratio
            else "."
        ),
    ]
    return "\n".join(lines)


def _row(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def replace_table(page: str, kernels: Sequence[HeldOutKernel]) -> str:
    """`page` with the table between its markers replaced; raises `TraceError` if it has no such markers."""
    pattern = f"{re.escape(BEGIN)}.*?{re.escape(END)}"
    text, count = re.subn(pattern, lambda _: f"{BEGIN}\n{table(kernels)}\n{END}", page, flags=re.S)
    if count != 1:
        raise TraceError(f"docs/validation.md: no lines '{BEGIN}' and '{END}', once each")
    return text
