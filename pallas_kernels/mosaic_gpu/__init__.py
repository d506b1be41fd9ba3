"""What the Pallas Mosaic GPU kernels share (Hopper: compute capability 9.0)."""
