"""Bindings of kernels to PyTorch: one file or folder for each family of ``burnish.kernels``.

In it stand side by side the schemas of the operators that its sources (``.cpp``) implement, what nodes become (``@translates``),
and what chooses between ways as a graph runs.
"""
