"""Which operators form one kernel, and the regions of a network."""
