"""Operators that read elements by index: gradients that add where was read."""
