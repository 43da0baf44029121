"""Which weights of a quantized model stay as they were."""

from __future__ import annotations

from collections import Counter

import onnx_ir as ir

from burnish.graph import FLOATING, constant_array
from burnish.graph.quantization_mark import KEY


def remaining_line(model: ir.Model) -> str | None:
    """Return a line that says which operators of a quantized model read weights in floating-point numbers, and how many.

    Weights are initializers of two dimensions or more. Recurrent layers and embeddings are read so, and layers that were skipped.

    Args:
        model: as ``burnish.surgery.quantize`` returns it.

    Returns:
        None where every weight is quantized.
    """
    readers: Counter[str] = Counter()
    remaining = total = 0
    for value in model.graph.initializers.values():
        if value.dtype not in FLOATING or value.shape is None or len(value.shape) < 2:
            continue
        array = constant_array(value)
        if array is None or array.size < 2:
            continue
        total += array.size
        direct = {reader for reader, _ in value.uses() if not _leads_to_integers(reader)}
        if direct:
            remaining += array.size
            readers.update({reader.op_type for reader in direct})
    if not remaining:
        return None
    which = ", ".join(f"{count} initializers of {operator}" for operator, count in sorted(readers.items()))
    return f"{remaining / total:.0%} of the weights stay in floating-point numbers: {which}"


def _leads_to_integers(reader: ir.Node) -> bool:
    """Whether a node quantizes a weight, or brings it into blocks before that."""
    while KEY not in reader.metadata_props:
        readers = [following for following, _ in reader.outputs[0].uses()]
        if reader.op_type not in ("Reshape", "Transpose") or len(readers) != 1:
            return False
        reader = readers[0]
    return True
