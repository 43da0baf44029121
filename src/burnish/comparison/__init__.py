"""Engines side by side: the same steps on several, how far they are apart, and at which node of the model that begins; and the
gradients of a program beside central differences.

How an engine runs a graph is in ``burnish.engines``. How long one takes is not measured here, but in ``benchmarks/``.
"""

from burnish.comparison.differences import TensorCheck
from burnish.comparison.engines import Comparison, compare_engines
from burnish.comparison.gradients import GradientCheck, Projection, check_gradients

__all__ = ["Comparison", "GradientCheck", "Projection", "TensorCheck", "check_gradients", "compare_engines"]
