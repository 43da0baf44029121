"""Products with a weight and their gradients, and products of batches."""
