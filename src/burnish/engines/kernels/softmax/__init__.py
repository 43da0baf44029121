"""Softmax cross-entropy: the graph pass that finds it, and the passes over memory."""
