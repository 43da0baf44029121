"""Bindings of kernels to PyTorch: one file or folder for each family of ``burnish.kernels``.

Each contains the schemas of the operators that its sources (``.cpp``) implement, the translations of nodes (``@translates``), and
the choice between implementations at run time.
"""
