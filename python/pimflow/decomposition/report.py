"""Reports on decomposed networks: as dataclasses, from which JSON is written, and as text."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class ClassAgreement:
    """How well a decomposed classifier agrees with the original, in shares of the samples.

    Attributes
    ----------
    max_relative_difference : float
        Of the outputs for all samples.
    top1_agreement : float
        Share of samples for which both networks give the same first class.
    top5_agreement : float
        Share of samples whose original first class is among the first five of the decomposed network.
    top1_accuracy, top5_accuracy, top1_accuracy_original, top5_accuracy_original : float or None
        Against labels; None without labels.
    """

    samples: int
    max_relative_difference: float
    top1_agreement: float
    top5_agreement: float
    top1_accuracy: float | None
    top5_accuracy: float | None
    top1_accuracy_original: float | None
    top5_accuracy_original: float | None


@dataclass(frozen=True, kw_only=True)
class MapAgreement:
    """How well a decomposed network agrees with the original, if its outputs are maps.

    Attributes
    ----------
    max_relative_difference : float
        Of the outputs for all samples.
    dice : float
        2 |A and B| / (|A| + |B|) over all pixels, averaged over all classes that occur.
    dice_to_labels, dice_to_labels_original : float or None
        Against labels; None without labels.
    """

    samples: int
    max_relative_difference: float
    dice: float
    dice_to_labels: float | None
    dice_to_labels_original: float | None


@dataclass(frozen=True, kw_only=True)
class DecomposedLayer:
    """A decomposed layer and its chain.

    Attributes
    ----------
    rule : str
        The rule that gave its ranks.
    reconstruction_error : float
        Of the filters, relative to their norm.
    error : float or None
        Error that the search used for it, if any: see `decomposition.layer_errors`.
    """

    name: str
    chain: tuple[str, ...]
    method: str
    rule: str
    ranks: tuple[int, ...]
    reconstruction_error: float
    error: float | None
    weight_elements: int
    weight_elements_original: int
    macs: int
    macs_original: int


@dataclass(frozen=True, kw_only=True)
class AloneTimes:
    """Time that a layer takes by itself, original and as a chain; ns."""

    original: float
    decomposed: float


@dataclass(frozen=True, kw_only=True)
class DecompositionReport:
    """Which layers were decomposed and how, and how far outputs are from the original's.

    Attributes
    ----------
    request : str
        The request, as text.
    weight_bytes, weight_bytes_original : int
        Of all constants, fp32.
    max_relative_difference : float or None
        Of the outputs; None if they were not compared.
    calibration : ClassAgreement or MapAgreement or None
        On the user's samples; None without samples.
    error_sum : float or None
        Sum of the layers' errors, if the search computed them. A bound on the error applies to it.
    errors_measured : bool
        Whether errors are those of outputs for the user's samples; else they are those of the filters.
    kept : tuple of str
        Layers that were requested but stay original, because that is cheaper.
    alone_ns : dict of str to AloneTimes
        By layer for which a search compared both.
    """

    request: str
    weight_bytes: int
    weight_bytes_original: int
    max_relative_difference: float | None
    calibration: ClassAgreement | MapAgreement | None
    error_sum: float | None
    errors_measured: bool
    layers: tuple[DecomposedLayer, ...]
    kept: tuple[str, ...]
    alone_ns: dict[str, AloneTimes]


@dataclass(frozen=True, kw_only=True)
class ExportReport(DecompositionReport):
    """A `DecompositionReport` of a network that was exported as ONNX.

    Attributes
    ----------
    output : str
        Path of the file.
    nodes, bytes : int
        Of the file.
    export_error : float
        How far its outputs are from those of the network that pimflow compiles.
    """

    output: str
    nodes: int
    bytes: int
    export_error: float


@dataclass(frozen=True, kw_only=True)
class ReducedSkip:
    """A skip connection of which the reduced tensor is stored, not the full one.

    Attributes
    ----------
    uses : tuple of str
        Layers that read it; before each of them, a copy of the layers that restore it.
    restores, reduced : tuple of str
        The layers that restore the full tensor, and the reduced tensors that are stored.
    flops, flops_original : int
        Of one copy, and of the layers that were decomposed.
    """

    tensor: str
    size_bytes: int
    uses: tuple[str, ...]
    restores: tuple[str, ...]
    reduced: tuple[str, ...]
    flops: int
    flops_original: int


@dataclass(frozen=True, kw_only=True)
class SkipsReport:
    """How skip connections of a decomposed network were optimised; see `skips.SkipOptimisation`."""

    criterion: str
    changed: bool
    kept_because: str
    candidates: int
    transformation: str
    sites: tuple[str, ...]
    folded: tuple[str, ...]
    copies: tuple[ReducedSkip, ...]
    flops_given: int
    flops: int
    weight_bytes: int
    pool_given_bytes: int | None
    pool_bytes: int | None


def decomposition_text(report: DecompositionReport) -> str:
    """Text: what was decomposed, and how far the result is from the original."""
    by_rule = Counter(layer.rule for layer in report.layers)
    ranks = "; " + ", ".join(f"{n} at {rule}" for rule, n in by_rule.items()) if len(by_rule) > 1 else ""
    text = f"{len(report.layers)} layers decomposed ({report.request}{ranks})"
    if report.kept:
        text += f", {len(report.kept)} kept as they came, which is cheaper"
    if not report.layers:
        return text
    errors = {layer.reconstruction_error: layer.name for layer in report.layers}
    max_error = max(errors)
    text += (
        f", weights {report.weight_bytes_original / 1e6:.3f} → {report.weight_bytes / 1e6:.3f} MB, "
        f"reconstruction error up to {max_error:.3f} of the filters' norm ('{errors[max_error]}')"
    )
    if report.max_relative_difference is not None:
        share = report.max_relative_difference
        text += f"; outputs differ from the original network's by up to {share:.2e} of the largest value"
    if report.error_sum is not None:
        error_source = "outputs, each measured alone," if report.errors_measured else "filters"
        text += f"; errors of {error_source} add up to {report.error_sum:.2e}"
        if report.errors_measured and report.calibration is not None:
            text += f", all at once {report.calibration.max_relative_difference:.2e}"
    return text


def agreement_text(report: ClassAgreement | MapAgreement) -> str:
    """Text: how often a decomposed network gives the same result as the original."""
    if isinstance(report, MapAgreement):
        text = f"Dice {report.dice:.4f} to the original's maps"
        if report.dice_to_labels is not None:
            text += f"; to labels {report.dice_to_labels_original:.4f} → {report.dice_to_labels:.4f}"
    else:
        text = f"the original's class comes first for {report.top1_agreement:.1%}"
        text += f", among five for {report.top5_agreement:.1%}"
        if report.top1_accuracy is not None:
            text += (
                f"; the label {report.top1_accuracy_original:.1%} → {report.top1_accuracy:.1%}, among five "
                f"{report.top5_accuracy_original:.1%} → {report.top5_accuracy:.1%}"
            )
    return f"{text} ({report.samples} samples)"


def export_text(report: ExportReport) -> str:
    """Text: what was exported, and how far its outputs are from those of what pimflow compiles."""
    lines = [decomposition_text(report)]
    if report.calibration:
        lines.append(agreement_text(report.calibration))
    lines.append(
        f"{report.output}: {report.nodes} nodes, {report.bytes / 1e6:.3f} MB; outputs within "
        f"{report.export_error:.1e} of the largest value of those of the network that pimflow compiles"
    )
    return "\n".join(lines)


def skips_text(report: SkipsReport) -> str:
    """Text: how skip connections of a decomposed network were optimised."""
    if not report.changed:
        return f"kept: {report.kept_because}"
    copies = sum(len(skip.uses) for skip in report.copies)
    transformation_texts = {
        "merge": "lconvs merged",
        "split": "fconvs split",
        "merge, split": "lconvs merged, fconvs split",
    }
    text = (
        f"{len(report.copies)} of {report.candidates} wait in their reduced form, {copies} copies of lconvs"
    )
    text += f"; {transformation_texts[report.transformation]}" if report.transformation else ""
    text += f"; {len(report.folded)} layers folded into one with the layer before" if report.folded else ""
    assert report.pool_given_bytes is not None and report.pool_bytes is not None
    pools = f"{report.pool_given_bytes / 1e6:.3f} → {report.pool_bytes / 1e6:.3f} MB"
    work = f"{report.flops_given / 1e9:.3f} → {report.flops / 1e9:.3f} GFLOP"
    return f"{text}; pool of the network on the GPU {pools}, {work}"
