"""Softmax's gradient, and cross-entropy of class indices."""
