"""Translation of ONNX graphs into PyTorch graphs: the walk, the registry of its rules, and the rules of plain operators.

Rules that call the engine's own kernels, or choose between implementations, are in ``bindings``.
"""
