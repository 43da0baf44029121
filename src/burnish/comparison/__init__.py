"""Comparison of engines over the same steps, down to the first differing node, and of gradients with central differences.

``burnish.engines`` runs graphs; ``benchmarks/`` measures speed.
"""

from burnish.comparison.differences import TensorCheck
from burnish.comparison.engines import Comparison, compare_engines
from burnish.comparison.gradients import GradientCheck, Projection, check_gradients

__all__ = ["Comparison", "GradientCheck", "Projection", "TensorCheck", "check_gradients", "compare_engines"]
