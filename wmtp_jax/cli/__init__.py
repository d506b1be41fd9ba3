"""The `wmtp` command."""
