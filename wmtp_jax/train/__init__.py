"""Training of the small demonstration model."""
