"""The command line: options, progress, and what each command prints."""
