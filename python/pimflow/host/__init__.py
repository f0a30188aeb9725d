"""This process and machine: the C++ library, Ctrl-C, files, pictures, cached results, workers; no TVM."""
