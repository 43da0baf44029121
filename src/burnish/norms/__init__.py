"""Normalization policies: what each batch normalization layer does during training, and what can be done to the layers.

The mathematics of the layers is in ``burnish.ops.normalization``; a policy is put into a graph by ``burnish.modes``.
"""

from burnish.norms.policies import NormPolicy, RunningVariance, default_running_variance, layer_name, resolve_policies

__all__ = ["NormPolicy", "RunningVariance", "default_running_variance", "layer_name", "resolve_policies"]
