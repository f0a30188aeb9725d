"""The public API, a file a command. `pimflow` itself hands on the public names."""
