"""Adapters: small trainable weights next to a frozen model, and their files.

``burnish.surgery`` exports the public functions; ``graph`` has the annotations of adapters in a model.
"""
