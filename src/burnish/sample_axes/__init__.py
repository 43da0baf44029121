"""Where the samples of a batch stand in the values of a model's graph: data sets, predictions and workers need to know.

``find_sample_axes`` marks the inputs, ``result_axes`` tells it of outputs. ``Analysis`` follows axes through the graph, by
``axes`` in the record of each operator; ``numbered`` says what the numbers that are drawn for a value are drawn for;
``mixing_nodes`` gives the nodes that work along samples. Nothing is emitted here; what is made of it is in ``burnish.modes``,
``burnish.compiler`` and ``burnish.distributed``.
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
