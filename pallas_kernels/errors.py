"""The one error that the operations raise on purpose."""


class UnsupportedKernel(ValueError):
    """An implementation that does not exist, or that cannot run here or with these shapes; the message says why."""
