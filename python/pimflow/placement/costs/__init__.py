"""What candidates take on both devices."""
