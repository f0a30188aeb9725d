"""Programs and timelines in the forms of other tools."""
