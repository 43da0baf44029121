"""Where the samples of a batch stand in the values of a model's graph: what workers that have parts of it need to know.

``Analysis`` follows axes through the graph, by what is known of each operator (``rules``); ``numbered`` says what the numbers
that are drawn for a value are drawn for; ``mixing_nodes`` gives the nodes that work along samples. Nothing is emitted here; what
is made of it is in ``burnish.modes``, ``burnish.compiler`` and ``burnish.distributed``.
"""

from burnish.sample_axes.analysis import Analysis
from burnish.sample_axes.inputs import sample_inputs
from burnish.sample_axes.mixing import Mixing, mixing_nodes
from burnish.sample_axes.numbering import numbered

__all__ = ["Analysis", "Mixing", "mixing_nodes", "numbered", "sample_inputs"]
