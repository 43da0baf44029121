"""Small starting models, by the name of their family."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import onnx
import onnx_ir as ir

from burnish.errors import ConfigurationError
from burnish.graph.annotations import INITIAL
from burnish.models.bert import bert
from burnish.models.cnn import cnn
from burnish.models.gpt2 import gpt2
from burnish.models.layers import check_extents, check_input_shape
from burnish.models.lstm import lstm
from burnish.models.mlp import mlp
from burnish.models.residual import residual_network
from burnish.models.ssd import ssd
from burnish.models.unet import unet
from burnish.validation import check_choice, check_count

VOCABULARY, VOCABULARY_OF_GPT = 30522, 50257
"""Vocabulary sizes of the tokenizers of BERT and GPT-2."""
TRANSFORMER, GPT = "transformer", "gpt"
BUILDERS: dict[str, Callable[..., ir.Model]] = {
    "mlp": mlp,
    "cnn": cnn,
    "resnet": residual_network,
    "unet": unet,
    "ssd": ssd,
    "lstm": lstm,
}
NAMES = ("mlp", "cnn", "resnet", "unet", "ssd", TRANSFORMER, GPT, "lstm")


def create(
    name: str, *, classes: int | None = None, input_shape: Sequence[int], seed: int = 0, vocabulary: int | None = None
) -> onnx.ModelProto:
    """Return a small model with initial weights, ready for training.

    | name | `input_shape` | input | output, `logits` if not named |
    |---|---|---|---|
    | `mlp` | `(features,)`; more dimensions are flattened | `x` | `[batch, classes]` |
    | `cnn`, `resnet` | `(channels, height, width)` | `x` | `[batch, classes]` |
    | `unet` | `(channels, height, width)`, multiples of 8 | `x` | `[batch, classes, height, width]` |
    | `ssd`, a detector | `(channels, height, width)`, multiples of 8 | `x` | `boxes`, `scores` of the loss `ssd` |
    | `transformer` | `(length,)`, the longest text in tokens | `input_ids`, `attention_mask` | `[batch, classes]` |
    | `gpt`, a causal decoder | `(length,)`, the longest text in tokens | `input_ids` | `[batch, tokens, vocabulary]` |
    | `lstm` | `(length, features)` | `x` | `[batch, classes]` |

    The batch size is open. The functions of the same names in ``burnish.models`` (``residual_network`` for ``resnet``, ``bert``
    for ``transformer``, ``gpt2`` for ``gpt``) have more size options.

    Args:
        name: name of the family.
        classes: number of classes; a gpt has none.
        input_shape: shape of a sample, without the batch.
        seed: seed of the initial weights; the same seed gives the same bits.
        vocabulary: for a transformer or a gpt, the size of the tokenizer's vocabulary; by default BERT's 30,522 or GPT-2's
            50,257.

    Raises:
        ConfigurationError: an unknown name, a size that is not a whole number of at least 1 or is too large, or an input shape
            that the family does not support.

    Examples:
        >>> model = burnish.models.create("cnn", classes=3, input_shape=(3, 64, 64))
        >>> program = burnish.compile(model, loss="cross_entropy", optimizer="adam")
    """
    check_choice("models.create", "name", name, NAMES)
    check_count(name, 0, seed=seed)
    if name == GPT:
        if classes is not None:
            raise ConfigurationError(
                f"gpt: classes={classes}: it has a score for each token of its vocabulary: leave classes out"
            )
        check_input_shape(name, input_shape, "length")
        rows = VOCABULARY_OF_GPT if vocabulary is None else vocabulary
        check_extents(name, vocabulary=rows)
        return _initial(gpt2(rows, positions=input_shape[0], seed=seed))
    if classes is None:
        raise ConfigurationError(f"{name}: the number of classes is missing: give classes=3 (--classes 3) or another")
    check_extents(name, classes=classes)
    if name == TRANSFORMER:
        check_input_shape(name, input_shape, "length")
        rows = VOCABULARY if vocabulary is None else vocabulary
        check_extents(name, vocabulary=rows)
        return _initial(bert(rows, classes, positions=input_shape[0], seed=seed))
    if vocabulary is not None:
        raise ConfigurationError(
            f"{name}: vocabulary={vocabulary} is for a transformer or a gpt, which read tokens: leave it out"
        )
    return _initial(BUILDERS[name](input_shape, classes, seed=seed))


def _initial(model: ir.Model) -> onnx.ModelProto:
    INITIAL.set(model, True)
    return ir.to_proto(model)
