"""Batch, group and row normalization with the activation and the addition around it."""
