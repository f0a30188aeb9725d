"""A network in C, compiled and verified where there is a compiler."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from pimflow.compiler.build import LayerPrimitives, with_primitives
from pimflow.compiler.c_code import builds
from pimflow.compiler.c_code import source as c_source
from pimflow.compiler.c_code.source import CSource
from pimflow.compiler.c_report import CReport
from pimflow.compiler.conditioning import OutputReference, output_checks
from pimflow.core.output_error import OutputCheck, max_error_check
from pimflow.core.plan import Plan
from pimflow.errors import UsageError
from pimflow.frontend import Network
from pimflow.frontend.reference import Fp16Storage
from pimflow.hardware import System


@dataclass(frozen=True, kw_only=True)
class CNetwork:
    """A network as C source, the result of ``--target c``, and its report."""

    source: CSource
    report: CReport


def require_no_pim(plan: Plan | None) -> None:
    """Raise `UsageError` for a plan that uses PIM, which target C does not support."""
    on_pim = [choice.region for choice in plan.choices if choice.uses_pim] if plan else []
    if on_pim:
        raise UsageError(
            f"--target c has no PIM, but the plan puts '{on_pim[0]}' there; search a plan without PIM"
        )


def c_network(
    network: Network,
    system: System,
    primitives: LayerPrimitives | None,
    samples: Sequence[Mapping[str, np.ndarray]],
    references: Sequence[OutputReference],
) -> CNetwork:
    """Write `network` in C; compile it, run it and compare outputs if there is a compiler.

    Parameters
    ----------
    samples : sequence of mappings of str to ndarray
        Inputs of each run, in the network's order and dtypes; times are taken on the first.

    Raises
    ------
    ArtifactError
        If the compiler fails.
    UnsupportedOpError
        See `compiler.c_code.source.source`.
    VerificationError
        If the outputs are wrong.
    """
    module = with_primitives(network.module, primitives) if primitives else network.module
    source = c_source.source(module, system, network.name)
    report = CReport(
        options=tuple(builds.OPTIONS), pool_bytes=source.pool_bytes, weight_bytes=len(source.weights)
    )
    local = builds.local_compiler()
    if local is None:
        return CNetwork(source=source, report=replace(report, flaw=builds.NO_COMPILER))
    library, values = builds.Library(source), list(samples[0].values())
    checks: list[OutputCheck] = []
    for inputs, reference in zip(samples, references, strict=True):
        # On all cores, so that threads that write the same words show as wrong outputs.
        outputs = library(list(inputs.values()), library.max_threads)
        checks += output_checks(reference, Fp16Storage(), system.dtype, inputs, outputs)
    check = max_error_check(checks)
    check.require_match("outputs of the C code")
    report = replace(
        report,
        compiler=local.version,
        max_relative_error=check.relative_error,
        measured_ns=library.call_ns(values),
        threads=library.max_threads,
        parallel_ns=library.call_ns(values, library.max_threads) if library.max_threads > 1 else None,
    )
    return CNetwork(source=source, report=report)
