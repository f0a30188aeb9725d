"""Products handed to the PIM code generator."""
