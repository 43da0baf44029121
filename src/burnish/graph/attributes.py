"""Reading attributes of nodes."""

from __future__ import annotations

from typing import Any

import onnx_ir as ir


def attribute_value(node: ir.Node, name: str, default: Any) -> Any:
    """Return the value of an attribute, or ``default``, the standard's, where the node leaves it out."""
    attribute = node.attributes.get(name)
    return default if attribute is None else attribute.value
