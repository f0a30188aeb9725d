"""Timing, function, legality and energy of PIM programs."""
