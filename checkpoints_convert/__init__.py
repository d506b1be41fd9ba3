"""Hugging Face folders in, Orbax checkpoints out: readers, one name table a family, a streaming writer, checks."""

from checkpoints_convert.load import load_hf

__all__ = ["load_hf"]
