"""The program: six pure graphs, one signature, the initial state; saving and loading them.

How a graph is differentiated, optimised or lowered lives in lower layers; how it is run, in ``burnish.engines``.
"""

from burnish.program.signature import Entry, GraphSignature, Role, Signature

__all__ = ["Entry", "GraphSignature", "Role", "Signature"]
