"""The pass that brings a network into canonical form, on which all later passes work."""

from __future__ import annotations

import numpy as np
import tvm
from tvm import relax

from pimflow.relay_passes.canonical.evaluate_constants import CompileConstants, EvaluateConstants
from pimflow.relay_passes.canonical.flatten_products import FlattenProducts
from pimflow.relay_passes.canonical.fold_normalisation import FoldNormalisation
from pimflow.relay_passes.canonical.fold_padding import FoldPadding
from pimflow.relay_passes.canonical.merge_bias import MergeBias
from pimflow.relay_passes.canonical.plain_activations import PlainActivations
from pimflow.relay_passes.canonical.plain_axes import PlainAxes
from pimflow.relay_passes.canonical.plain_integers import PlainIntegers
from pimflow.relay_passes.canonical.plain_powers import PlainPowers
from pimflow.relay_passes.canonical.plain_slices import PlainSlices
from pimflow.relay_passes.canonical.plain_softmax import PlainSoftmax
from pimflow.relay_passes.canonical.plane_convolutions import PlaneConvolutions
from pimflow.relay_passes.canonical.push_bias import PushBias
from pimflow.relay_passes.canonical.recognise_attention import RecogniseAttention
from pimflow.relay_passes.canonical.recognise_clip import RecogniseClip
from pimflow.relay_passes.canonical.recognise_group_norm import RecogniseGroupNorm
from pimflow.relay_passes.canonical.single_results import SingleResults
from pimflow.relay_passes.canonical.sink_layout import SinkLayout
from pimflow.relay_passes.canonical.subpixel_convolution import SubpixelConvolution
from pimflow.relay_passes.flat import LAYER_NAMES, main_bindings, operator, rebuild

ANCHORS = ("nn.conv2d", "nn.conv2d_transpose", "matmul")


LAYOUTS = {"nn.conv2d": ["NHWC", "OHWI"], "nn.conv2d_transpose": ["NHWC", "IOHW"]}


@tvm.transform.module_pass(opt_level=0, name="ConvertConvolutions")
class ConvertConvolutions:
    """`ConvertLayout`, only where there is a convolution: its time grows with the square of the operators.

    Rewrite: convolutions in `LAYOUTS`, with ``permute_dims`` around them and operators that keep a layout.
    Preserves: values, interface of ``main``.
    """

    def transform_module(self, mod: tvm.IRModule, _: tvm.transform.PassContext) -> tvm.IRModule:
        """`mod` after the pass."""
        if not any(operator(binding.value) in LAYOUTS for binding in main_bindings(mod)):
            return mod
        return relax.transform.ConvertLayout({f"relax.{name}": dims for name, dims in LAYOUTS.items()})(mod)


@tvm.transform.module_pass(opt_level=0, name="Canonicalise")
class Canonicalise:
    """Bring an inference graph into canonical form, in NHWC.

    Batch normalisation and constants are folded, clamps are ``clip`` or ``relu``, zeros around inputs are
    padding of the convolutions, biases are pushed to where they cost nothing, convolutions are NHWC with OHWI
    filters, convolutions and matrix products keep their names, and attention over a cache is one call.

    Parameters
    ----------
    pushed_biases : dict of str to ndarray, optional
        As in `PushBias`, but by layer name.

    Rewrite: ``batch_norm(conv2d(x, w)) -> conv2d(x, w') + b``, NCHW -> NHWC, see the passes called.
    Preserves: values up to rounding, interface of ``main`` (its inputs and outputs stay NCHW).
    """

    def __init__(self, pushed_biases: dict[str, np.ndarray] | None = None):
        self.pushed_biases = {} if pushed_biases is None else pushed_biases

    def transform_module(self, mod: tvm.IRModule, _: tvm.transform.PassContext) -> tvm.IRModule:
        """`mod` after the pass."""
        pushed: dict[str, np.ndarray] = {}
        mod = PlaneConvolutions()(SingleResults()(EvaluateConstants()(mod)))
        names = [b.var.name for b in _anchors(mod)]
        transform = relax.transform
        mod = tvm.transform.Sequential(
            [
                PlainIntegers(),
                PlainAxes(),
                PlainSlices(),
                RecogniseGroupNorm(),
                FoldPadding(),
                PlainActivations(),
                PlainPowers(),
                RecogniseClip(),
                MergeBias(),
                FoldNormalisation(),
                transform.DecomposeOpsForInference(),
                EvaluateConstants(),
                ConvertConvolutions(),
                EvaluateConstants(),
                SubpixelConvolution(),
                SinkLayout(),
                EvaluateConstants(),
                CompileConstants(),
                PlainSlices(),  # again: only now are all indices constants
                PlainSoftmax(),
                FlattenProducts(),
                PushBias(pushed),
                transform.CanonicalizeBindings(),
                transform.DeadCodeElimination(["main"]),
            ]
        )(mod)
        return RecogniseAttention()(self._restore_names(mod, names, pushed))

    def _restore_names(
        self, mod: tvm.IRModule, names: list[str], pushed: dict[str, np.ndarray]
    ) -> tvm.IRModule:
        """`mod` whose layers have their original `names`, which are given in order."""
        anchors = [b.var for b in _anchors(mod)]
        if len(anchors) != len(names):
            return mod  # a layer was folded away or merged: the names no longer line up
        renamed = dict(zip(anchors, names))
        layers = LAYER_NAMES.read(mod)
        self.pushed_biases |= {
            layers.get(n, n): pushed[v.name] for v, n in renamed.items() if v.name in pushed
        }

        def rename(builder: relax.BlockBuilder, var: relax.Var, value: relax.Expr) -> relax.Expr | None:
            return builder.emit(value, name_hint=renamed[var]) if var in renamed else None

        return rebuild(mod, rename)


def _anchors(mod: tvm.IRModule) -> list[relax.VarBinding]:
    return [b for b in main_bindings(mod) if operator(b.value) in ANCHORS]
