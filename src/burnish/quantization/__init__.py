"""Quantization-aware training.

``graph`` has the annotations of quantizers in a model; ``burnish.surgery`` exports ``quantize``.
"""
