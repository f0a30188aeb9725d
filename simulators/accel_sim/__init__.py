"""Accel-Sim: traces for it, its logs, and a profiler that runs it."""
