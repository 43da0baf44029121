"""Batch normalization in training with what stands around it: the graph pass that finds it, and the passes over memory."""
