"""Images with what is where in them: objects with their boxes, in COCO's and PASCAL VOC's formats, and masks of classes.

``images`` reads and flips them, ``objects`` makes batches of boxes, ``coco`` and ``voc`` read the two formats, ``masks`` pairs of
images and masks. Images with one class each are in ``burnish.data.image``.
"""
