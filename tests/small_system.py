"""A system whose PIM is so small that little fills it."""

from dataclasses import replace

from pimflow.hardware import PimSpec, System, system


def small(name: str) -> System:
    """Two channels of four banks with rows so short that a cache of tens of tokens takes several."""
    spec = PimSpec.load(name)
    count = 2 if spec.comp_starts_at_row else 1
    pim = replace(spec, name="small", banks_per_gang=4 // spec.gangs, columns_per_row=2, buffer_columns=count)
    return replace(system(pim=name), pim=pim, pim_channels=2)
