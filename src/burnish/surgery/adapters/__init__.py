"""Adapters: small weights that train beside a model that stays as it is, and their files.

How an export computes one weight of both is in ``burnish.rewriting.merge_adapters``.
"""

from burnish.surgery.adapters.lora import lora
from burnish.surgery.adapters.peft import load_peft, merge_adapters, save_peft

__all__ = ["load_peft", "lora", "merge_adapters", "save_peft"]
