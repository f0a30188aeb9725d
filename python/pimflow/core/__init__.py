"""Core types of all rooms: regions, candidates, plans, PIM programs; without TVM and without devices."""
