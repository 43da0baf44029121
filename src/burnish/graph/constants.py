"""Reading values that are known when the graph is built."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir


def constant_array(value: ir.Value | None) -> np.ndarray | None:
    """Return the array behind an initializer or a ``Constant`` node, or None when it is known only at run time.

    A graph input with a default (an initializer that is also an input) is not a constant: a caller may override it.
    """
    if value is None or value.is_graph_input():
        return None
    node = value.producer()
    if value.const_value is None and node is not None and node.op_type == "Constant" and node.domain == "":
        attribute = node.attributes.get("value")
        # Nearly all constants; that the tensor is one by its methods takes long to find out.
        if attribute is not None and isinstance(attribute.value, ir.Tensor):
            return attribute.value.numpy()
    tensor = ir.convenience.get_const_tensor(value)
    return None if tensor is None else tensor.numpy()
