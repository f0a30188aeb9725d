"""Writers of programs and timelines in the formats of other tools."""
