"""Exchanges with other workers, and the kernels by which those of one machine share memory."""
