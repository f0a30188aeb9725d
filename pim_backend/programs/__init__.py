"""From a layer to a PIM program: what PIM can run, loop orders, layout of weights; without TVM."""
