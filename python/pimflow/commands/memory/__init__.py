"""Memory of networks, and networks with decomposed layers (Occamy, TeMCO)."""
