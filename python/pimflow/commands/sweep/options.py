"""Options of `sweep` beside those of its searches."""

MAX_POINTS = 10_000  # searches, unless more are allowed
