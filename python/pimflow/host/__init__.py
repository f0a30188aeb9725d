"""Process and machine: the C++ library, interrupts, files, pictures, result cache, workers; no TVM."""
