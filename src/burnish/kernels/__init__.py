"""Kernels of burnish's own: their mathematics in C++, the graph passes that put them into graphs, how they are compiled.

There is a folder for each family: its operators in ``__init__``, its graph passes in ``fusion``, and its headers. Mathematics is
written once, against ``tensor.h``. Each engine has an ``engine_tensor.h`` of its own, which says what a tensor and a thread are
there, and bindings that make operators of the engine's out of what stands here. Nothing here imports an engine.
"""
