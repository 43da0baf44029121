"""Samples that a training graph mixes before the model reads them, as a loss asks for."""

from __future__ import annotations

from collections.abc import Iterator

from burnish.compiler.draft import Draft
from burnish.errors import ConfigurationError
from burnish.graph import Builder, Tensor
from burnish.losses import Loss, Mixed
from burnish.program.signature import Role


def mix_inputs(draft: Draft, loss: Loss, key: Tensor, is_cached: bool) -> Tensor | None:
    """Let a training graph read mixed samples, in place, where its loss is ``Mixed``.

    Args:
        draft: the graph, bound to training, without its loss.
        loss: of the program.
        key: of the step.
        is_cached: whether the graph begins at features that are computed once.

    Returns:
        The share that a sample has in its mixture, a float32 scalar; None where nothing is mixed.

    Raises:
        ConfigurationError: the model has several inputs, or one that cannot be mixed, or its features are computed once; or a
            part of the loss is ``Mixed``.
    """
    if not isinstance(loss, Mixed):
        if any(isinstance(inner, Mixed) for inner in _inside(loss)):
            raise ConfigurationError(
                f"{Mixed.name}: {loss.name} holds it, and samples are mixed under the loss as a whole alone: put {Mixed.name} "
                f"around {loss.name}, where that reads one output and its labels, or train without mixing"
            )
        return None
    if is_cached:
        raise ConfigurationError(
            f"{loss.name}: samples are mixed anew in each step, and features of a frozen backbone are computed once for each "
            "sample: compile without cached_features"
        )
    entries = [entry for entry in draft.inputs if entry.role is Role.DATA]
    if len(entries) != 1 or not entries[0].extents:
        names = ", ".join(f"'{entry.name}'" for entry in entries)
        raise ConfigurationError(
            f"{loss.name}: samples of one input are mixed, and the model reads {names}: train without mixing, or mix what you "
            "feed it"
        )
    value, axis = draft.values()[entries[0].name], entries[0].sample_axis
    if axis is None:
        raise ConfigurationError(
            f"{loss.name}: the input '{value.name}' has no samples, and samples are mixed: say along which axis it has them "
            "(sample_axis=..., --sample-axis), or train without mixing"
        )
    if not entries[0].dtype.is_floating_point() and entries[0].dtype.name not in ("UINT8", "INT8"):
        raise ConfigurationError(
            f"{loss.name}: the input '{value.name}' is {entries[0].dtype.name}: indices cannot be mixed, only numbers: train "
            "without mixing"
        )
    readers = tuple(value.uses())
    builder = Builder(draft.model.graph, before=next(iter(draft.model.graph), None))
    with builder.attributed("the mixing of samples"):
        draws = loss.draws(builder, builder.tensor(key.value))
        mixed, share = loss.mixed_inputs(builder.tensor(value), draws, axis)
    for reader, index in readers:
        reader.replace_input_with(index, mixed.value)
    return draft.builder.tensor(share.value)


def _inside(loss: Loss) -> Iterator[Loss]:
    """The losses that a loss is made of."""
    summands = getattr(loss, "summands", ())
    for inner in (getattr(loss, "loss", None), *(summand.loss for summand in summands)):
        if isinstance(inner, Loss):
            yield inner
            yield from _inside(inner)
