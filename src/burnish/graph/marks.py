"""What a node says of itself in its metadata, as JSON: how it is quantized or pruned."""

from __future__ import annotations

from typing import Any, TypeVar

import onnx_ir as ir

from burnish.errors import ModelError
from burnish.graph.describe import describe_node
from burnish.untrusted import UNREADABLE, read_json

Mark = TypeVar("Mark")


def read_mark(node: ir.Node, key: str, kind: type[Mark]) -> Mark | None:
    """Return what the metadata of a node says under a key; None where it says nothing.

    Args:
        node: of a model, perhaps from elsewhere.
        key: of the entry.
        kind: the dataclass whose fields the entry has.

    Raises:
        ModelError: the entry is no JSON, or has other fields.
    """
    text = node.metadata_props.get(key)
    if text is None:
        return None
    try:
        fields: dict[str, Any] = read_json(text)
        return kind(**fields)
    except UNREADABLE as error:
        raise ModelError(
            f"{describe_node(node)} has an entry '{key}' in its metadata that this burnish cannot read ({error!r}): quantize or "
            "prune the model again, or remove the entry"
        ) from error
