"""Run compiled directories."""
