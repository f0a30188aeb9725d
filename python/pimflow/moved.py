"""Names that could be imported before modules were sorted into rooms, each with the place it has now.

For one version, importing or reading one of them says in a line where it went.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType

# Modules that kept their names: the packages that had and have them, without ``pimflow.``, and the names.
_MOVED = """
. api: kernel_traces profilers published report timeline
. compiler: artifact c_code layer_order smaller_pool
. compiler.measurement: cuda_profiler
. core: output_error
. host: interrupts native without_torch
. pim_backend.runtime: targets
. tvm_extension: relay
. tvm_extension.relay: pass_options
pim_backend pim_backend.programs: capability layout lowering rolling schedule
pim_backend pim_backend.runtime: codegen
placement host: executors
placement placement.candidates: pipelines tasks tiled_kernels tilings
placement placement.costs: pim_runs splits
placement placement.solvers: evaluate exhaustive objectives plan_memory steps
relay_passes relay_passes.c_kernels: plain_c vector_calls
relay_passes relay_passes.canonical: canonicalise evaluate_constants flatten_products fold_padding
relay_passes relay_passes.canonical: plain_activations plain_axes push_bias recognise_clip
relay_passes relay_passes.canonical: single_results sink_layout subpixel_convolution
relay_passes relay_passes.decomposition: branches decompose fold_lconvs layer_flops merge_lconvs
relay_passes relay_passes.decomposition: optimize_skips separate_phases split_concat
relay_passes relay_passes.kernels: fuse_groups group_kernels outline_groups select_primitives
relay_passes relay_passes.kernels: store_half
relay_passes relay_passes.memory: allocate_each buffers keep_views lift_workspaces
relay_passes relay_passes.memory: overwriting plan_pool reorder_layers
relay_passes relay_passes.pim: decompose_to_matrix_vector drop_codegen_constants outline_pim
relay_passes relay_passes.regions: extract_regions kernel_groups padded_inputs
relay_passes relay_passes.schedules: keep_registers loops
relay_passes relay_passes.schedules: schedule_cpu schedule_gpu
relay_passes relay_passes.schedules: schedule_primitives schedule_primitives_gpu
relay_passes relay_passes.schedules: schedule_tensor_cores
relay_passes relay_passes.splits: pipeline_rows split_batch split_channels split_mddp split_parts
relay_passes relay_passes.splits: split_reduction
simulators simulators.exports: aim_isr perfetto
simulators simulators.pim: bound checker energy expansion functional timing trace
"""
# Modules and functions with another name, or another package of their own.
_RENAMED = {
    "allocation": "compiler.measurement.allocations",
    "commands": "cli",
    "compilation": "compiler.build",
    "core.collector": "host.garbage_collection",
    "decomposed": "decomposition",
    "deep_fusion": "fusion",
    "design_settings": "hardware.settings",
    "design_space": "api.sweep",
    "devices": "hardware.description",
    "execution": "pim_backend.runtime.network_module",
    "fused_execution": "fusion.kernels",
    "inference": "api.run",
    "kernel_builds": "compiler.measurement.single_kernels",
    "kernels": "pim_backend.runtime.cuda_binary",
    "measure": "compiler.measurement.kernel_times",
    "network_kernels": "primitive_selection.network_time",
    "network_memory": "api.memory",
    "network_search": "api.search",
    "operator_memory": "api.published.occamy_operators",
    "relay_passes.kernel_memory": "relay_passes.memory.operator_memory",
    "pipeline": "compiler.phases",
    "placement.cache": "host.result_cache",
    "placement.fused": "placement.candidates.fused_groups",
    "placement.selection": "primitive_selection.problem",
    "placement.selection_ilp": "primitive_selection.problem",
    "placement.selection_instances": "api.published.taso_instances",
    "placement.selection_search": "primitive_selection.search",
    "placement.solve": "placement.solvers.label_search",
    "primitive_kernels": "primitives.kernels",
    "primitive_profiles": "primitive_selection",
    "profiling": "api.profile",
    "relay_passes.own_barriers": "relay_passes.schedules.keep_barriers",
    "relay_passes.registers": "relay_passes.schedules.thread_registers",
    "selection_figures": "primitive_selection.figures",
    "simulation": "api.simulate",
    "simulators.accel_sim_accuracy": "simulators.accel_sim.accuracy",
    "simulators.accel_sim_gemm": "simulators.accel_sim.gemm",
    "simulators.accel_sim_kernels": "simulators.accel_sim.kernels",
    "simulators.accel_sim_launch": "simulators.accel_sim.launch",
    "simulators.accel_sim_log": "simulators.accel_sim.log",
    "simulators.accel_sim_simd": "simulators.accel_sim.simd",
    "simulators.accel_sim_trace": "simulators.accel_sim.trace",
    "simulators.gpu_data": "simulators.gpu.samples",
    "simulators.gpu_fit": "simulators.gpu.fit",
    "simulators.gpu_learned": "simulators.gpu.learned_model",
    "simulators.gpu_learned_fit": "simulators.gpu.learned_fit",
    "simulators.gpu_model": "simulators.gpu.model",
    "simulators.gpu_roofline": "simulators.gpu.roofline",
    "simulators.ramulator2": "simulators.ramulator.load_store_trace",
    "simulators.ramulator_adapter": "simulators.ramulator.fork",
    "tracing": "api.trace",
    "verify": "compiler.verification",
    "api.Compiled": "Compiled",
    "api.count_operators": "api.published.occamy_operators.count_operators",
    "api.execute_fused": "execute_fused",
    "api.export_decomposed": "export_decomposed",
    "api.fuse_decomposed": "fuse_decomposed",
    "api.infer": "infer",
    "api.measure_allocations": "measure_allocations",
    "api.plan_memory": "plan_memory",
    "api.regions": "api.prepare.regions",
    "api.search_network": "search_network",
    "api.torch_peak_bytes": "api.published.occamy_operators.torch_peak_bytes",
    "api.trace_plan": "trace_plan",
    "fusion.fuse": "fuse",
    "fusion.fuse_decomposed": "fuse_decomposed",
    "primitive_selection.select": "select",
}


def _joined(package: str, name: str) -> str:
    return ".".join(filter(None, ("pimflow", package, name)))


def _moved() -> dict[str, str]:
    found = {_joined("", old): _joined("", new) for old, new in _RENAMED.items()}
    for line in _MOVED.strip().splitlines():
        packages, names = line.split(": ")
        old, new = packages.split()
        found |= {_joined(old.strip("."), name): _joined(new, name) for name in names.split()}
    return found


MOVED = _moved()


def missing(module: str, name: str) -> AttributeError:
    """The error for a name that `module` does not have, which says where it went if it moved."""
    went = MOVED.get(f"{module}.{name}")
    return AttributeError(
        f"module '{module}' has no attribute '{name}'" if went is None else _said(module, name)
    )


def _said(module: str, name: str) -> str:
    return f"'{module}.{name}' has moved: it is '{MOVED[f'{module}.{name}']}' now"


class _Finder:
    """Says where a module went that no other finder found."""

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if name in MOVED:
            raise ImportError(_said(*name.rsplit(".", 1)), name=name)
        return None


def install() -> None:
    """Look moved names up behind all others."""
    sys.meta_path.append(_Finder())
