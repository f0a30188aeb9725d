"""The command line itself: parsers, streams, and how results are printed."""
