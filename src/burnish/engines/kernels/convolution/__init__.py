"""Headers of the kernels of convolutions and of their gradients, for images with their channels last."""
