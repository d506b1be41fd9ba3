"""Collocation-length prediction (CLP, arXiv 2606.10935).

The backbone writes the first token of every step, heads on its last hidden state propose the next ones, and one linear
layer says how many of them to take. Taken without verification they change the text. Verified, the same heads and the
same layer are a drafter like any other, and the text is the backbone's own.
"""
