"""What a model needs and what a step should cost on a machine, worked out from its shape alone."""
