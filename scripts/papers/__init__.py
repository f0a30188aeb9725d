"""The papers' own comparisons, on our compiler."""
