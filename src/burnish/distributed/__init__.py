"""Data-parallel training: how several workers are one.

Nothing here reads data or keeps a run, and nothing imports PyTorch before it is used.
"""
