"""Commands: a folder for each family, with its Python API and its side of the command line."""
