"""What makes a PyTorch graph of an ONNX graph: the walk, the registry of its rules, and the rules of plain operators.

Rules that call the engine's own kernels, or choose between ways to compute the same, stand in ``bindings``.
"""
