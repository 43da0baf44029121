"""Normalization policies: the mode of each batch normalization layer during training, chosen by pattern.

A policy is text, ``name`` or ``name:settings``, or an object of a class in this module; ``str(policy)`` is the text. Commas
separate settings: ``ghost:32``, ``train:momentum=cumulative``, ``renorm:r_max=2,d_max=3``.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from enum import StrEnum
from typing import ClassVar, Literal

import onnx_ir as ir

from burnish.errors import ConfigurationError
from burnish.graph.names import further_names, module_in, weight_of
from burnish.graph.names import layer_name as name_of_layer
from burnish.registry import Registry
from burnish.settings import PlainSettings, matches_pattern
from burnish.validation import is_number, is_whole, require

CUMULATIVE: Literal["cumulative"] = "cumulative"


@dataclass(frozen=True)
class NormPolicy(PlainSettings):
    """The mode of a batch normalization layer in the training graph. Evaluation always uses the running statistics."""

    name: ClassVar[str]

    @property
    def owner(self) -> str:
        return f"norm: {self.name}"

    def settings(self) -> str:
        """Return the settings that differ from their defaults, as text."""
        given = {setting.name: (getattr(self, setting.name), setting.default) for setting in fields(self)}
        return ",".join(f"{name}={_text(value)}" for name, (value, default) in given.items() if value != default)

    def __str__(self) -> str:
        settings = self.settings()
        return f"{self.name}:{settings}" if settings else self.name


@dataclass(frozen=True)
class Auto(NormPolicy):
    """``auto``: ``train``, but ``frozen`` if none of the layer's parameters trains, so that frozen layers do not change.

    A layer without parameters is frozen if nothing before it trains, while some part of the model does not train.
    """

    name: ClassVar[str] = "auto"


@dataclass(frozen=True)
class Frozen(NormPolicy):
    """``frozen``: normalizes with the running statistics, which never change.

    Args:
        affine: True to train scale and bias; as text, ``frozen`` is True and ``frozen:all`` is False.
    """

    name: ClassVar[str] = "frozen"
    affine: bool = True

    def settings(self) -> str:
        return "" if self.affine else "all"


@dataclass(frozen=True)
class BatchStatistics(NormPolicy):
    """A policy that normalizes with statistics of the batch and updates the running ones.

    Args:
        momentum: share of the running statistics that a step keeps, in [0, 1]:
            ``running * momentum + batch * (1 - momentum)``; PyTorch's momentum is 1 minus it. ``cumulative``: the average over
            all updates (PyTorch's momentum None); the first step then replaces the model's statistics. None: the value in the
            model's layer.
        seen: with ``cumulative``, the number of batches in the model's statistics: the next batch has weight 1 / (seen + 1).
            A PyTorch module stores it as ``num_batches_tracked``.
    """

    momentum: float | Literal["cumulative"] | None = field(default=None, kw_only=True)
    seen: int = field(default=0, kw_only=True)

    def __post_init__(self) -> None:
        is_count = is_whole(self.seen) and self.seen >= 0
        require(is_count, self.owner, "seen", self.seen, "a whole number of batches, 0 or more")
        if self.seen and self.momentum != CUMULATIVE:
            raise ConfigurationError(
                f"norm: {self.name}: seen={self.seen} counts the batches of an average, and momentum is {self.momentum!r}: give "
                "momentum=cumulative with it, or leave seen out"
            )
        if self.momentum is not None and self.momentum != CUMULATIVE and not _is_fraction(self.momentum):
            raise ConfigurationError(
                f"norm: {self.name}: momentum must be a number from 0 to 1, the part that a step retains, or 'cumulative', "
                f"not {self.momentum!r}"
            )


@dataclass(frozen=True)
class Train(BatchStatistics):
    """``train``: statistics of the batch."""

    name: ClassVar[str] = "train"


@dataclass(frozen=True)
class Sync(BatchStatistics):
    """``sync``: statistics of the batch over all workers; with one worker the same as ``train``.

    Args:
        group: number of workers with consecutive ranks that share statistics: as text, ``sync:4``. None: all workers.
    """

    name: ClassVar[str] = "sync"
    group: int | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.group is not None and (not is_whole(self.group) or self.group < 1):
            raise ConfigurationError(
                f"norm: sync: group must be a whole number of workers, 1 or more, not {self.group!r}: write 'sync:4'"
            )

    def settings(self) -> str:
        return _joined("" if self.group is None else str(self.group), self)


@dataclass(frozen=True)
class Local(BatchStatistics):
    """``local``: each worker uses the statistics of its own part of the batch; with one worker the same as ``train``.

    The running statistics are updated with the average of the workers' statistics, weighted by their numbers of elements.
    """

    name: ClassVar[str] = "local"


@dataclass(frozen=True)
class Ghost(BatchStatistics):
    """``ghost:<size>``: statistics over groups of ``size`` consecutive samples (Hoffer, Hubara and Soudry 2017).

    A step updates the running statistics once, with the means of the groups' means and variances.

    Args:
        size: samples in a group; the batch must be a multiple of it.
    """

    name: ClassVar[str] = "ghost"
    size: int

    def __post_init__(self) -> None:
        super().__post_init__()
        if not is_whole(self.size) or self.size < 1:
            raise ConfigurationError(
                f"norm: ghost: size must be a whole number of samples, 1 or more, not {self.size!r}: write 'ghost:32'"
            )

    def settings(self) -> str:
        return _joined(str(self.size), self)


@dataclass(frozen=True)
class Renorm(BatchStatistics):
    """``renorm``: batch renormalization, statistics of the batch corrected toward the running ones (Ioffe 2017, algorithm 1).

    The correction r is in [1 / r_max, r_max] and d in [-d_max, d_max]. Up to step ``start`` the bounds are 1 and 0, the same as
    ``train``; then they grow linearly to their full values at steps ``r_max_step`` and ``d_max_step``. If ``start`` and the step
    of a bound are both 0, the bound is full from the first step.
    """

    name: ClassVar[str] = "renorm"
    r_max: float = 3.0
    d_max: float = 5.0
    start: int = 5_000
    r_max_step: int = 40_000
    d_max_step: int = 25_000

    def __post_init__(self) -> None:
        super().__post_init__()
        for name, lowest in (("r_max", 1), ("d_max", 0)):
            number = getattr(self, name)
            require(is_number(number) and number >= lowest, self.owner, name, number, f"a finite number of {lowest} or more")
        for name in ("start", "r_max_step", "d_max_step"):
            number = getattr(self, name)
            require(is_whole(number) and number >= 0, self.owner, name, number, "a whole number of steps, 0 or more")
        for name in ("r_max_step", "d_max_step"):
            number = getattr(self, name)
            if number <= self.start and (number, self.start) != (0, 0):
                raise ConfigurationError(
                    f"norm: renorm: {name}={number}, where the bound is full, must lie behind start={self.start}, where it "
                    f"begins to grow; start=0,{name}=0 is full from the first step"
                )


POLICIES: Registry[NormPolicy] = Registry(
    "norm policy",
    {policy.name: policy for policy in (Auto, Train, Frozen, Sync, Local, Ghost, Renorm)},
    home="burnish.norms",
    is_made=lambda given: isinstance(given, NormPolicy),
    bare=True,
)


class RunningVariance(StrEnum):
    """The variance of a batch that enters the running variance."""

    ONNX = "onnx"  # population: divided by N
    PYTORCH = "pytorch"  # unbiased: divided by N - 1


def get(policy: str | NormPolicy) -> NormPolicy:
    """Return the policy for a text; an object is returned unchanged.

    Raises:
        ConfigurationError: an unknown policy, an unknown setting, or a setting out of range.
    """
    if isinstance(policy, str) and "".join(policy.split()) == str(Frozen(affine=False)):
        return Frozen(affine=False)
    return POLICIES.resolve(policy)


def layer_name(node: ir.Node) -> str:
    """Return the name that patterns match: the module that the layer's weight is named after, otherwise the node's name."""
    weight = weight_of(node)
    if weight is None or (module_in(weight.name or "") is None and node.name):
        return node.name or ""
    return name_of_layer(node, weight)


def matches_layer(node: ir.Node, pattern: str) -> bool:
    """True if a shell-style pattern matches the name of a layer, its node or its module."""
    weight = weight_of(node)
    names = [node.name or ""] if weight is None else further_names(node, weight, layer_name(node))
    return any(matches_pattern(name, pattern) for name in names)


def layer_names(nodes: Sequence[ir.Node]) -> tuple[str, ...]:
    """Return layer names; ambiguous ones are followed by the node name."""
    names = [layer_name(node) for node in nodes]
    return tuple(
        name if names.count(name) == 1 else f"{name} ({node.name or index})"
        for index, (name, node) in enumerate(zip(names, nodes, strict=True))
    )


def resolve_policies(
    norm: str | NormPolicy | Mapping[str, str | NormPolicy], nodes: Sequence[ir.Node]
) -> dict[ir.Node, NormPolicy]:
    """Return a policy for every batch normalization node.

    Args:
        norm: one policy for all, or {pattern: policy} with shell-style patterns over layer and node names; the last match wins,
            and layers without a match are ``auto``.
        nodes: the BatchNormalization nodes of the model.

    Raises:
        ConfigurationError: an unknown policy, or a pattern that matches no layer.
    """
    if isinstance(norm, str | NormPolicy):
        return dict.fromkeys(nodes, get(norm))
    if not isinstance(norm, Mapping):
        raise ConfigurationError(f"norm must be a policy, such as 'train' or 'frozen', or {{pattern: policy}}, not {norm!r}")
    policies: dict[ir.Node, NormPolicy] = dict.fromkeys(nodes, Auto())
    for pattern, value in norm.items():
        if not isinstance(pattern, str):
            raise ConfigurationError(f"norm: a pattern is the name of a layer, in which * stands for any text, not {pattern!r}")
        policy = get(value)
        matches = [node for node in nodes if matches_layer(node, pattern)]
        if not matches:
            known = ", ".join(f"'{layer_name(node)}'" for node in nodes[:8]) or "none"
            raise ConfigurationError(
                f"norm: the pattern '{pattern}' matches no batch normalization layer; the model's layers are: {known}"
                + (f" and {len(nodes) - 8} more" if len(nodes) > 8 else "")
            )
        for node in matches:
            policies[node] = policy
    return policies


def norm_without_effect(
    norm: str | NormPolicy | Mapping[str, str | NormPolicy], running_variance: str | None, nodes: Sequence[ir.Node]
) -> Iterator[str]:
    """Yield a sentence for each option that applies to no batch normalization node, except ``auto`` and ``frozen``."""
    if isinstance(norm, Mapping):
        holding = {
            next(pattern for pattern in reversed([*norm]) if matches_layer(node, pattern))
            for node in nodes
            if any(matches_layer(node, pattern) for pattern in norm)
        }
        for pattern in norm:
            if pattern not in holding:
                yield f"norm: '{pattern}' holds for no layer: patterns after it match all that it matches; put it after them"
    given = {} if isinstance(norm, Mapping) or isinstance(get(norm), Auto | Frozen) else {"norm": str(norm)}
    for name, value in {**given, "running_variance": running_variance}.items() if not nodes else ():
        if value is not None:
            yield (
                f"{name}='{value}' changes nothing: the model has no batch normalization. Leave it out; or export the model with "
                "it kept, or put layers in (burnish.surgery.insert)"
            )


def default_running_variance(model: ir.Model) -> RunningVariance:
    """Return PyTorch's rule for a model exported by PyTorch, otherwise the standard's."""
    return RunningVariance.PYTORCH if (model.producer_name or "").lower() == "pytorch" else RunningVariance.ONNX


def _joined(first: str, policy: BatchStatistics) -> str:
    """Return settings as text; the first has no name."""
    momentum = "" if policy.momentum is None else f"momentum={_text(policy.momentum)}"
    return ",".join(filter(None, (first, momentum, f"seen={policy.seen}" if policy.seen else "")))


def _is_fraction(value: object) -> bool:
    return is_number(value) and 0 <= value <= 1


def _text(value: float | str) -> str:
    return str(int(value)) if isinstance(value, float) and value.is_integer() else str(value)
