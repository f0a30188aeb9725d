"""The canonical form of a network."""
