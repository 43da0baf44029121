"""The program: six pure graphs, one signature, the initial state; saving and loading them.

How a graph is differentiated, optimised or lowered lives in lower layers; how it is run, in ``burnish.engines``.
"""

from burnish.program.program import GRAPH_NAMES, Program
from burnish.program.signature import Entry, GraphSignature, Role, Signature

__all__ = ["GRAPH_NAMES", "Entry", "GraphSignature", "Program", "Role", "Signature"]
