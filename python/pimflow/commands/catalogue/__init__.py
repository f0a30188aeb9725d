"""Devices and networks that there are."""
