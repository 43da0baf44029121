"""Adapters: small weights that train next to a model whose own weights stay as they are, and their files.

``burnish.surgery`` exports the functions for users. ``graph`` holds what a model says of its adapters.
"""
