"""Core types: what every layer speaks. Nothing here knows TVM or a device."""
