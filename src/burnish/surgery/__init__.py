"""Changes to a model: it converts, inserts and recalibrates normalization layers, normalizes weights, and resizes tables.

Each takes a model and returns another; a session's statistics are recalibrated in place. How layers are trained is in
``burnish.norms``, and their mathematics in ``burnish.ops.normalization``.
"""

from burnish.surgery.convert import convert
from burnish.surgery.insert import insert, unfold
from burnish.surgery.recalibrate import recalibrate
from burnish.surgery.resize_table import resize_table
from burnish.surgery.weight_normalization import weight_normalize

__all__ = ["convert", "insert", "recalibrate", "resize_table", "unfold", "weight_normalize"]
