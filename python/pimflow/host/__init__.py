"""This process and machine: the C++ library, Ctrl-C, files, pictures, kept results, workers; without TVM."""
