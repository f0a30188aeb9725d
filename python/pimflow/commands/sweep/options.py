"""Options of `sweep` beside those of its searches."""

MAX_POINTS = 10_000  # searches, unless more are allowed
# Points that a sweep can compile: the best of each network, or those that no other dominates.
POINTS = BEST, FRONT = "best", "front"
