"""Changes to a model: new heads, cutting and joining; normalization layers and weights; embedding tables; adapters; pruning;
quantization.

Each function returns a new model, except that ``recalibrate`` changes a session's statistics in place. Policies for training
layers are in ``burnish.norms``, their mathematics in ``burnish.operators.normalization``.
"""

from burnish.adapters.lora import lora
from burnish.adapters.peft import load_peft, merge_adapters, save_peft
from burnish.quantization.quantize import quantize
from burnish.surgery.convert import convert
from burnish.surgery.cut_and_join import append, rename, truncate
from burnish.surgery.insert import insert, unfold
from burnish.surgery.prepend_preprocessing import prepend_preprocessing
from burnish.surgery.prune import prune
from burnish.surgery.recalibrate import recalibrate
from burnish.surgery.replace_head import Head, find_head, replace_head
from burnish.surgery.resize_table import resize_table
from burnish.surgery.weight_normalization import weight_normalize

__all__ = [
    "Head",
    "append",
    "convert",
    "find_head",
    "insert",
    "load_peft",
    "lora",
    "merge_adapters",
    "prepend_preprocessing",
    "prune",
    "quantize",
    "recalibrate",
    "rename",
    "replace_head",
    "resize_table",
    "save_peft",
    "truncate",
    "unfold",
    "weight_normalize",
]
