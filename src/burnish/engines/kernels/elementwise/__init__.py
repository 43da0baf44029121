"""Chains of elementwise arithmetic, each in one pass over memory: the graph pass that finds them, and the kernel."""
