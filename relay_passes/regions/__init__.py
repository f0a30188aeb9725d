"""Which operators are one kernel, and the regions made of that."""
