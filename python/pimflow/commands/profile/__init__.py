"""Time the candidates of networks."""
