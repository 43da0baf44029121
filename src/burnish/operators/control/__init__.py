"""Operators with bodies: a branch that is taken (If), a loop (Loop), a recursion over slices (Scan).

Their gradients are such nodes again. A body of the gradient computes the values that it reads of the forward body again, from
what was captured and, in loops, from the states that each iteration began with: these are all that the forward pass keeps.
"""

from burnish.operators.control import branches, loops, scans

__all__ = ["branches", "loops", "scans"]
