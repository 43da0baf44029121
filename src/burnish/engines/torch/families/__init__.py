"""One folder for each kind of layer that the engine has more for than one ATen operator.

In a folder stand side by side what rewrites graphs (``fusion``, ``..._fusion``), what nodes become (``translation``), what
chooses between ways as a graph runs (``dispatch``), and the kernels (``.cpp``). What fusions put into graphs are operators of the
domain ``burnish``.
"""
