"""Passes that decide what becomes one kernel, which primitive computes it, and which type it stores."""
