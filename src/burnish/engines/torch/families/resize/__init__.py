"""Resize and its gradient."""
