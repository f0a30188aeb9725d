"""Constants of outlined regions, which are already in their runtime modules."""

from __future__ import annotations

import tvm

_CONSTANTS = "const_name_to_constant"  # where RunCodegen stores them and TVM's linker finds them


@tvm.transform.module_pass(opt_level=0, name="DropCodegenConstants")
class DropCodegenConstants:
    """Drop the second copy of the filters that PIM computes with.

    A PIM module holds its filters in the layout of the banks. `RunCodegen` also stores them in fp32, for
    modules that ask for them at run time; they would be linked into every library.

    Rewrite: the module's attribute ``const_name_to_constant`` is dropped.
    Preserves: values exactly, functions.
    """

    def transform_module(self, mod: tvm.IRModule, _: tvm.transform.PassContext) -> tvm.IRModule:
        return mod.without_attr(_CONSTANTS) if mod.attrs and _CONSTANTS in mod.attrs else mod
