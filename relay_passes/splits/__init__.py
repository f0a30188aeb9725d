"""A layer in parts: rows, channels, reduction, batch, stages."""
