"""Analyses of a graph: memory needs, dependence between values, and the use of parameters and indices.

Nothing here changes a graph; ``burnish.rewriting`` does.
"""
