"""Normalization layers: one file per layer, and the statistics they share.

What a batch normalization does with its running statistics is decided in ``burnish.modes`` and ``burnish.norms``.
"""
