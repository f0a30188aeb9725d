"""From a layer to a PIM program: what PIM can run, loop orders, where weights lie; without TVM."""
