"""A network as C, for any C compiler."""
