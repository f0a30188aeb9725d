"""Costs of candidates on both devices."""
