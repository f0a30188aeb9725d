"""Timing, functional simulation, legality and energy of PIM programs."""
