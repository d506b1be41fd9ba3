"""Lossless long-context speculative decoding in JAX for models with a Multi-Token-Prediction head."""
