"""Image files to model pixels: decoding, augmentation, MixUp and CutMix.

``burnish.data`` assigns files to classes; ``burnish.data.preprocessing`` converts pixels to numbers.
"""
