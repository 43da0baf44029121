"""Rewrites of graphs, one per file, and the stages that list them (``stages``).

A rewrite changes a model in place and returns whether it did. Modules are imported one by one: this package imports none.
What a single operator becomes is in ``burnish.operators``; what is only read off a graph, in ``burnish.analysis``.
"""
