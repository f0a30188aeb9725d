"""What each command does, a file a command. `pimflow` itself hands on the public names."""
