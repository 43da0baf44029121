"""Models that train as they will compute with integers.

``graph`` holds what a model says of its quantizers; ``burnish.surgery`` exports ``quantize``.
"""
