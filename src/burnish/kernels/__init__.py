"""Burnish's own kernels: their mathematics in C++, the graph passes that insert them, and their compilation.

Each family has a folder with its operators in ``__init__``, its graph passes in ``fusion``, and its headers. Mathematics is
written once, against ``tensor.h``. Each engine defines tensors and threads in its own ``engine_tensor.h``, and has bindings that
turn the kernels into its operators. Nothing here imports an engine.
"""
