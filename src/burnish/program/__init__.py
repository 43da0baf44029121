"""The program: six pure graphs, one signature, the weights and the state that training starts from.

How it is made of a model is in ``burnish.compiler``; how it is written to files, in ``burnish.files``; how it is run, in
``burnish.engines``.
"""

from burnish.program.program import GRAPH_NAMES, Program
from burnish.program.signature import Entry, GraphSignature, Role, Signature

__all__ = ["GRAPH_NAMES", "Entry", "GraphSignature", "Program", "Role", "Signature"]
