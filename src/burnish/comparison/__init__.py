"""Engines side by side: the same steps on several, how far they are apart, and at which node of the model that begins.

How an engine runs a graph is in ``burnish.engines``. How long one takes is not measured here, but in ``benchmarks/``.
"""

from burnish.comparison.engines import Comparison, compare_engines

__all__ = ["Comparison", "compare_engines"]
