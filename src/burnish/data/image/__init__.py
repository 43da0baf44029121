"""From the file of an image to the pixels that a model takes: decoding, random changes for training, MixUp and CutMix.

Which files belong to which classes is in the modules above; what pixels become as numbers is in ``burnish.data.preprocessing``.
"""
