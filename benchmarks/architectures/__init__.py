"""Small networks of the architectures that people train, in their standard form: what tests and benchmarks compare with PyTorch.

Every module is written here, from the paper that it names; sizes are arguments, and tiny unless they are given. What they take,
what they are trained with, and how they are found by name is in ``catalogue``.
"""
