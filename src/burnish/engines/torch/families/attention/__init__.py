"""Scaled dot-product attention without a matrix of probabilities."""
