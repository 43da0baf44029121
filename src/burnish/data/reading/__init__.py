"""Batches read in processes of their own, ahead of the step that takes them.

``ahead`` is the side of the training process, ``process`` that of a reading process, ``frames`` what goes between them.
"""
