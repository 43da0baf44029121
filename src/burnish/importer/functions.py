"""Model-local functions become the nodes they stand for."""

from __future__ import annotations

import onnx_ir as ir
from onnx_ir.passes.common import InlinePass

from burnish.errors import ModelError


def inline_functions(model: ir.Model) -> None:
    """Replace, in place, every call of a model-local function by its body.

    Raises:
        ModelError: a function that takes graphs as attributes, or uses another version of a custom domain than the model.
    """
    if not model.functions:
        return
    for function in model.functions.values():
        # The check has refused functions whose operators differ in version from the model's: the label alone differs.
        function.opset_imports[""] = model.opset_imports[""]
    try:
        InlinePass()(model)
    except Exception as error:
        raise ModelError(
            f"the functions of the model cannot be inlined: {error.__cause__ or error}. Inline them when the model is exported"
        ) from error
    model.functions.clear()
