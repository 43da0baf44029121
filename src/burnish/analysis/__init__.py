"""What is read off a graph: what its values need of memory, what they depend on, what its parameters and indices are for.

Nothing here changes a graph: what does is in ``burnish.rewriting``.
"""
