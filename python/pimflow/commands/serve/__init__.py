"""A server of a language model under load, from the times of its compiled steps."""
