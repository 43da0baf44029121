"""Chains of elementwise arithmetic, each in one pass over memory."""
