"""A model to start with, by the name of its family."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import onnx
import onnx_ir as ir

from burnish.errors import ConfigurationError
from burnish.models.bert import bert
from burnish.models.cnn import cnn
from burnish.models.layers import check_extents, check_input_shape
from burnish.models.lstm import lstm
from burnish.models.mlp import mlp
from burnish.models.residual import residual_network
from burnish.models.ssd import ssd
from burnish.models.unet import unet
from burnish.validation import check_choice, check_count

VOCABULARY = 30522
"""Tokens of BERT's tokenizer."""
TRANSFORMER = "transformer"
BUILDERS: dict[str, Callable[..., ir.Model]] = {
    "mlp": mlp,
    "cnn": cnn,
    "resnet": residual_network,
    "unet": unet,
    "ssd": ssd,
    "lstm": lstm,
}
NAMES = ("mlp", "cnn", "resnet", "unet", "ssd", TRANSFORMER, "lstm")


def create(
    name: str, *, classes: int, input_shape: Sequence[int], seed: int = 0, vocabulary: int | None = None
) -> onnx.ModelProto:
    """Return a small model with initial weights, ready to be trained.

    | name | `input_shape` | input | output, `logits` if not named |
    |---|---|---|---|
    | `mlp` | `(features,)`; more dimensions are flattened | `x` | `[batch, classes]` |
    | `cnn`, `resnet` | `(channels, height, width)` | `x` | `[batch, classes]` |
    | `unet` | `(channels, height, width)`, multiples of 8 | `x` | `[batch, classes, height, width]` |
    | `ssd`, a detector | `(channels, height, width)`, multiples of 8 | `x` | `boxes`, `scores` of the loss `ssd` |
    | `transformer` | `(length,)`, the longest text in tokens | `input_ids`, `attention_mask` | `[batch, classes]` |
    | `lstm` | `(length, features)` | `x` | `[batch, classes]` |

    The number of samples in a batch is open. The functions of the same names in ``burnish.models`` (``residual_network`` for
    ``resnet``, ``bert`` for ``transformer``) take other sizes too.

    Args:
        name: of the family.
        classes: number of classes.
        input_shape: of a sample, without the batch.
        seed: of the initial weights; the same seed gives the same bits.
        vocabulary: of a transformer, how many tokens its tokenizer knows at most; by default 30,522, as BERT's does.

    Raises:
        ConfigurationError: an unknown name, a size that is no whole number of at least 1 or is too large, or an input shape that
            the family does not take.

    Examples:
        >>> model = burnish.models.create("cnn", classes=3, input_shape=(3, 64, 64))
        >>> program = burnish.compile(model, loss="cross_entropy", optimizer="adam")
    """
    check_choice("models.create", "name", name, NAMES)
    check_extents(name, classes=classes)
    check_count(name, 0, seed=seed)
    if name == TRANSFORMER:
        check_input_shape(name, input_shape, "length")
        rows = VOCABULARY if vocabulary is None else vocabulary
        check_extents(name, vocabulary=rows)
        return ir.to_proto(bert(rows, classes, positions=input_shape[0], seed=seed))
    if vocabulary is not None:
        raise ConfigurationError(f"{name}: vocabulary={vocabulary} is for a transformer, which reads tokens: leave it out")
    return ir.to_proto(BUILDERS[name](input_shape, classes, seed=seed))
