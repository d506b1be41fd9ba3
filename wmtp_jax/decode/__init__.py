"""Speculative decoding: sampling, drafters, prefill, and the loop that drafts, verifies, accepts and commits."""
