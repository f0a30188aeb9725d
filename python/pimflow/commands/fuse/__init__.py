"""Deep Fusion of a network."""
