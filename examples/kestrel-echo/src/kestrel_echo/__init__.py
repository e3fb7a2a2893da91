"""A model family in a package of its own: a byte-level decoder of one layer."""
