"""The gradients of softmax and its logarithm, and cross-entropy of class indices."""
