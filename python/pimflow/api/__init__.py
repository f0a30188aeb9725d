"""The Python API: a file for each command. `pimflow` itself exports the public names."""
