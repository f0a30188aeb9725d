"""Pages of compiled directories."""
