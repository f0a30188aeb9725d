"""Buffers, views, pools, orders."""
