"""Normalization layers: one file per layer, and their shared statistics.

``burnish.modes`` and ``burnish.norms`` decide how a batch normalization uses its running statistics.
"""
