"""Convolutions and their gradients: by kernels of the engine, or by PyTorch's quickest way."""
