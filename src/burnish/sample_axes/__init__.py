"""The sample axes of the values in a model's graph, for data sets, predictions and workers.

``find_sample_axes`` marks the inputs; ``result_axes`` gives the axes of outputs. ``Analysis`` follows axes through the graph
with the ``axes`` rule of each operator; ``numbered`` describes the rows of random draws; ``mixing_nodes`` finds nodes that
mix samples. Nothing is emitted here: ``burnish.modes``, ``burnish.compiler`` and ``burnish.distributed`` use the results.
"""

from burnish.sample_axes.input_axes import AskedAxes, ask_sample_axes, find_sample_axes, result_axes
from burnish.sample_axes.mixing import Mixing, mixing_nodes
from burnish.sample_axes.propagation import Analysis, input_axes, moved_inputs, numbered, sample_inputs

__all__ = [
    "Analysis",
    "AskedAxes",
    "Mixing",
    "ask_sample_axes",
    "find_sample_axes",
    "input_axes",
    "mixing_nodes",
    "moved_inputs",
    "numbered",
    "result_axes",
    "sample_inputs",
]
