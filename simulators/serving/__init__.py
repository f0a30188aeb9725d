"""A server of a language model over simulated time: its schedule, a check of it, and what it takes."""
