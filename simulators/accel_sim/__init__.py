"""Accel-Sim: writer of its traces, reader of its logs, and a profiler that runs it."""
