"""Annotated images: objects with boxes (COCO and PASCAL VOC formats), and segmentation masks.

``images`` reads and flips them, ``objects`` makes batches of boxes, ``coco`` and ``voc`` read the two formats, and ``masks``
pairs images with masks. Images with one class each are in ``burnish.data.image``.
"""
