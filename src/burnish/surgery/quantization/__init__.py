"""Models quantized for training: pairs of QuantizeLinear and DequantizeLinear, calibrated.

How a pair trains is in ``burnish.rewriting.train_quantization``, what gradients pass is in
``burnish.rewriting.simulate_quantization``, and how an export makes integers of it in
``burnish.rewriting.fold_quantization``.
"""

from burnish.surgery.quantization.quantize import check_unquantized, quantize
from burnish.surgery.quantization.remaining import remaining_line

__all__ = ["check_unquantized", "quantize", "remaining_line"]
