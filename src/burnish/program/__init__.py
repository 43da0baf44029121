"""The program: six pure graphs, a signature, weights and the initial state.

``burnish.compiler`` makes programs from models, ``burnish.files`` writes them to files, and ``burnish.engines`` run them.
"""

from burnish.program.program import GRAPH_NAMES, Program
from burnish.program.signature import Entry, GraphSignature, Role, Signature

__all__ = ["GRAPH_NAMES", "Entry", "GraphSignature", "Program", "Role", "Signature"]
