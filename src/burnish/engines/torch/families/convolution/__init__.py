"""Convolutions and their gradients: by kernels of the engine, or by PyTorch's quickest way."""

from burnish.engines.torch.families.convolution import schemas  # noqa: F401  # declares the kernels
