"""Deep Fusion of a whole network: DRAM traffic and time, fused and layer by layer."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from pimflow import fusion, zoo
from pimflow.commands.fuse.fusion_report import FusionReport
from pimflow.commands.fuse.options import BASELINES, FuseOptions
from pimflow.commands.shared.arguments import public
from pimflow.decomposition.report import DecompositionReport
from pimflow.errors import UnknownNameError, UsageError
from pimflow.fusion import Accelerator, FusionPlan, LayerGraph

if TYPE_CHECKING:
    from pimflow.decomposition.network import DecompositionLike
    from pimflow.frontend import Model


def layer_graph(
    model: Model,
    baseline: str = "unfolded",
    shapes: Mapping[str, tuple[int, ...]] | None = None,
    batch: int | None = None,
) -> LayerGraph:
    """The layers of a network.

    Parameters
    ----------
    model, shapes, batch
        See `frontend.load`.
    baseline : str
        ``unfolded``: the layers of an ONNX network, with batch norms, scales and activations as layers of
        their own; ``folded``: the regions that pimflow compiles.

    Raises
    ------
    UnknownNameError
        For another baseline.
    UsageError
        If `baseline` is ``unfolded`` and the network is no ONNX network.
    """
    if baseline not in BASELINES:
        raise UnknownNameError("baseline", baseline, BASELINES)
    if baseline == "folded":
        from pimflow import frontend  # loads TVM, so only if regions are needed
        from pimflow.relay_passes.regions.extract_regions import extract_regions

        network = frontend.load(model, shapes, batch)
        return fusion.layers_from_regions(extract_regions(network.module, network.name))
    if not zoo.is_onnx(model):
        raise UsageError("only ONNX networks have unfolded layers; give --baseline folded for others")
    return fusion.layers_from_onnx(zoo.load_model(model, dict(shapes or {}), batch=batch, seed=None))


@public(FuseOptions)
def fuse(
    model: Model,
    accelerator: Accelerator | None = None,
    *,
    progress: Callable[[float], None] | None = None,
    **keywords: Any,
) -> FusionPlan:
    """Fuse the layers of a network into groups that pass once over on-chip memory.

    Parameters
    ----------
    model, baseline, shapes, batch
        See `layer_graph`.
    accelerator, progress
        See `fusion.fuse_layers`.
    reuse, search, halo, objective : str
        See `fusion.FusionRules`.
    """
    options = FuseOptions(**keywords)
    graph = layer_graph(model, options.baseline, options.shapes, options.batch)
    return fusion.fuse_layers(graph, accelerator, options, progress)


@dataclass(frozen=True, kw_only=True)
class DecomposedFusion:
    """The fusion plan of a decomposed network, compared with the original network.

    Attributes
    ----------
    decomposition : DecompositionReport
        The decomposed layers, and the error of outputs against the original's.
    dram_bytes_original : int
        DRAM traffic of the original network, layer by layer.
    """

    plan: FusionPlan
    decomposition: DecompositionReport
    dram_bytes_original: int

    @property
    def reduction(self) -> float:
        """Reduction of DRAM traffic by decomposition and fusion together, in [0, 1]."""
        return 1 - self.plan.dram_bytes / self.dram_bytes_original

    def report(self) -> FusionReport:
        """The report that ``pimflow fuse --decompose`` prints."""
        return replace(
            FusionReport.from_plan(self.plan),
            dram_bytes_original=self.dram_bytes_original,
            reduction_of_original=self.reduction,
            decomposition=self.decomposition,
        )


@public(FuseOptions)
def fuse_decomposed(
    model: Model,
    decompose: DecompositionLike,
    accelerator: Accelerator | None = None,
    *,
    note: Callable[[str], None] = lambda _: None,
    progress: Callable[[float], None] | None = None,
    **keywords: Any,
) -> DecomposedFusion:
    """Decompose layers of a network, and fuse the regions that pimflow compiles.

    Both networks are run once to compare their outputs.

    Parameters
    ----------
    baseline : str
        Layers of the original network that traffic is compared with; see `layer_graph`.
    note : callable
        Called with a text that says what is being done.
    accelerator, progress
        See `fusion.fuse_layers`.
    reuse, search, halo, objective : str
        See `fusion.FusionRules`.

    Raises
    ------
    DecompositionError, UsageError
        See `decomposition.network.decompose`.
    """
    from pimflow import frontend
    from pimflow.decomposition import network as decomposed_network
    from pimflow.relay_passes.regions.extract_regions import extract_regions

    request = decomposed_network.parse_request(decompose)
    if request is None:
        raise UsageError("no decomposition is requested: give one such as 'tucker:0.1'")
    decomposed_network.require_all(request, "an analysis of fused layers")
    options, accelerator = FuseOptions(**keywords), accelerator or Accelerator()
    original = layer_graph(model, options.baseline, options.shapes, options.batch)
    loaded = frontend.load(model, options.shapes, options.batch)
    change = decomposed_network.decompose(loaded, request, note)
    del loaded
    network = change.network
    graph = fusion.layers_from_regions(extract_regions(network.module, network.name))
    plan = fusion.fuse_layers(graph, accelerator, options, progress)
    note("comparing outputs")
    inputs = network.example_inputs()
    return DecomposedFusion(
        plan=plan,
        decomposition=change.summary([inputs], [network.reference(inputs)]),
        dram_bytes_original=sum(map(original.traffic_elements, original.layers)) * accelerator.element_bytes,
    )
