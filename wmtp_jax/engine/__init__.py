"""Many requests at once: continuous batching over one pool of pages, with prefixes that are read once."""
