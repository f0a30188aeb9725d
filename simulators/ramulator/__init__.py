"""Ramulator: the PIMFlow fork as a profiler, and load/store traces for Ramulator 2."""
