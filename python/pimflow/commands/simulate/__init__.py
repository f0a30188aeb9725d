"""Simulate PIM programs; write traces for other tools."""
