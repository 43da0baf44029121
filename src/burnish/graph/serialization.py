"""Models as protos, with the data of every tensor in them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import onnx
import onnx_ir as ir

from burnish.errors import BurnishError


@contextmanager
def named_failures() -> Iterator[None]:
    """Raise what failed where a tensor was read, a ``BurnishError``, in place of what ``onnx_ir`` makes of it."""
    try:
        yield
    except Exception as error:
        cause: BaseException | None = error
        while cause is not None and not isinstance(cause, BurnishError):
            cause = cause.__cause__ or cause.__context__
        if cause is None or cause is error:
            raise
        raise cause from None


def model_proto(model: ir.Model) -> onnx.ModelProto:
    """Return a model as a proto.

    Raises:
        ModelError: a file that holds a tensor of the model has been written to since the model was loaded.
    """
    with named_failures():
        return ir.to_proto(model)
