"""The hybrid decoder and its draft head as Flax modules: parameters in the module, caches in and out of every call."""
