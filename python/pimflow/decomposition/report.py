"""Lines for people about a decomposed network."""

from __future__ import annotations

from typing import Any


def decomposition_text(part: dict[str, Any]) -> str:
    """What was decomposed, and how far the result is from the original."""
    text = f"{len(part['layers'])} layers decomposed ({part['request']})"
    if part["kept"]:
        text += f", {len(part['kept'])} kept as they came, which is cheaper"
    if not part["layers"]:
        return text
    errors = {layer["reconstruction_error"]: layer["name"] for layer in part["layers"]}
    worst = max(errors)
    text += (
        f", weights {part['weight_bytes_original'] / 1e6:.3f} → {part['weight_bytes'] / 1e6:.3f} MB, "
        f"reconstruction error up to {worst:.3f} of the filters' norm ('{errors[worst]}')"
    )
    if part["max_relative_difference"] is not None:
        share = part["max_relative_difference"]
        text += f"; outputs differ from the original network's by up to {share:.2e} of the largest value"
    return text


def agreement_text(part: dict[str, Any]) -> str:
    """Agreement of a decomposed network with the original."""
    if "dice" in part:
        text = f"Dice {part['dice']:.4f} to the original's maps"
        if part["dice_to_labels"] is not None:
            text += f"; to labels {part['dice_to_labels_original']:.4f} → {part['dice_to_labels']:.4f}"
    else:
        text = f"the original's class comes first for {part['top1_agreement']:.1%}"
        text += f", among five for {part['top5_agreement']:.1%}"
        if part["top1_accuracy"] is not None:
            text += (
                f"; the label {part['top1_accuracy_original']:.1%} → {part['top1_accuracy']:.1%}, among five "
                f"{part['top5_accuracy_original']:.1%} → {part['top5_accuracy']:.1%}"
            )
    return f"{text} ({part['samples']} samples)"


def export_text(part: dict[str, Any]) -> str:
    """What was written, and how far it is from what pimflow makes of it."""
    lines = [decomposition_text(part)]
    if part["calibration"]:
        lines.append(agreement_text(part["calibration"]))
    lines.append(
        f"{part['output']}: {part['nodes']} nodes, {part['bytes'] / 1e6:.3f} MB; outputs within "
        f"{part['export_error']:.1e} of the largest value of those of the network that pimflow compiles"
    )
    return "\n".join(lines)


def skips_text(part: dict[str, Any]) -> str:
    """The changes to the skip connections of a decomposed network."""
    if not part["changed"]:
        return f"kept: {part['kept_because']}"
    copies = sum(len(skip["uses"]) for skip in part["copies"])
    how = {"merge": "lconvs merged", "split": "fconvs split", "merge, split": "lconvs merged, fconvs split"}
    text = (
        f"{len(part['copies'])} of {part['candidates']} wait in their reduced form, {copies} copies of lconvs"
    )
    text += f"; {how[part['transformation']]}" if part["transformation"] else ""
    text += f"; {len(part['folded'])} lconvs folded into fconvs" if part["folded"] else ""
    pools = f"{part['pool_given_bytes'] / 1e6:.3f} → {part['pool_bytes'] / 1e6:.3f} MB"
    work = f"{part['flops_given'] / 1e9:.3f} → {part['flops'] / 1e9:.3f} GFLOP"
    return f"{text}; pool of the network on the GPU {pools}, {work}"
