"""Memory of a network: buffers, views, pools, and the order of layers."""
