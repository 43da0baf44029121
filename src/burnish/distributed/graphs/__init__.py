"""The graph that each worker runs: a program's own, with the exchanges between workers in one fixed order.

``derivation`` puts them in, by the passes beside it. Graphs are rewritten here, and nothing is sent; what an exchange computes is
in ``burnish.operators.collectives``.
"""
