"""Parameter groups: separate settings, or none for frozen parameters, selected by name patterns."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from typing import Any

from burnish.errors import ConfigurationError
from burnish.graph import Builder, Tensor
from burnish.graph.names import Aliases, select_named
from burnish.optim.arithmetic import Tensors, double
from burnish.optim.base import Optimizer, RatedOptimizer, Transform, UpdateInputs, layers_of
from burnish.optim.parameters import NO_WEIGHTS, Infos, LastMatch, check_matches, decays, matching
from burnish.optim.slots import Slot, slots_of
from burnish.settings import matches_pattern
from burnish.validation import check_not_negative

FROZEN = "frozen"
LR_SCALE = "lr_scale"
Overrides = str | Mapping[str, Any] | RatedOptimizer
"""``frozen``; settings that differ from the optimizer's, and ``lr_scale``; or another optimizer."""
NO_GROUP: tuple[str, Overrides] = ("", {})
"""The group of parameters that no pattern matches."""


@dataclass(frozen=True)
class _Member:
    """Parameters with the same update.

    Attributes:
        label: suffix of state that belongs to no parameter; empty for the default group.
        optimizer: the optimizer, which gets its rate as an input.
        rated_by: label of the group whose rate applies; empty for the optimizer's own.
        scale: factor of the rate.
        names: the parameters.
    """

    label: str
    optimizer: RatedOptimizer
    rated_by: str
    scale: float
    names: tuple[str, ...]


@dataclass(frozen=True)
class Groups(Transform):
    """An optimizer with settings that differ by parameter, the mathematics of ``torch.optim`` over several groups.

    A parameter belongs to the last pattern that matches its name; without a match, the optimizer's own settings apply. All groups
    share the rate, times their ``lr_scale``, except groups with their own ``lr``, which becomes the program's input
    ``lr:<pattern>``. State of a parameter has the same name as without groups; other state of a group is named
    ``<slot>:<group>``.

    Attributes:
        optimizer: the optimizer.
        patterns: (pattern, overrides).
        decay: ``all``, or ``weights``: no weight decay on biases and normalization parameters.
        layer_decay: factor of the rate from each layer to the one before it; None for one rate.
        layers: patterns of the layers, from first to last; None for the order in the graph.
        infos, aliases: facts about the parameters, and their other names; ``burnish.compile`` sets both.
    """

    name = "groups"
    optimizer: RatedOptimizer
    patterns: tuple[tuple[str, Overrides], ...] = ()
    decay: str = "all"
    layer_decay: float | None = None
    layers: tuple[str, ...] | None = None
    infos: Infos | None = field(default=None, compare=False, repr=False)
    aliases: Aliases = field(default_factory=dict, compare=False, repr=False)

    def __post_init__(self) -> None:
        if not isinstance(self.optimizer, RatedOptimizer):
            raise ConfigurationError(
                f"groups: the optimizer must be a plain one, such as burnish.optim.sgd(), not {self.optimizer!r}: put groups "
                "inside what goes around it, as in chain(clip_by_norm(1.0), groups(sgd(), {...}))"
            )
        if self.decay not in ("all", "weights"):
            raise ConfigurationError(f"groups: decay must be 'all' or 'weights', not {self.decay!r}")
        if self.decay == "weights" and not _has(self.optimizer, "weight_decay"):
            raise ConfigurationError(
                f"groups: decay='weights' has no meaning for {self.optimizer.name}, which has no weight_decay"
            )
        for pattern, overrides in self.patterns:
            self._group_optimizer(pattern, overrides)
        if self.layer_decay is not None:
            check_not_negative("groups", layer_decay=self.layer_decay)

    def options(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "patterns": [[pattern, self._overrides_option(pattern, overrides)] for pattern, overrides in self.patterns],
            "decay": self.decay,
            "layer_decay": self.layer_decay,
            "layers": None if self.layers is None else list(self.layers),
            "optimizer": self.optimizer.options(),
            **({"aliases": aliases} if (aliases := self._selecting_aliases()) else {}),
        }

    def _selecting_aliases(self) -> dict[str, list[str]]:
        patterns = (*(pattern for pattern, _ in self.patterns), *(self.layers or ()))
        found = {
            name: [each for each in others if any(matches_pattern(each, pattern) for pattern in patterns)]
            for name, others in self.aliases.items()
        }
        return {name: others for name, others in found.items() if others}

    def bind(self, infos: Infos) -> Groups:
        names = [each for name in infos for each in self._names_of(name)]
        for pattern, _ in self.patterns:
            check_matches("groups", pattern, names)
        for pattern in self.layers or ():
            check_matches("layerwise_decay", pattern, names)
        return replace(self, infos=infos)

    def without_effect(self, names: Collection[str]) -> list[str]:
        found = []
        chosen = {self._index_of(name) for name in self.infos or ()}
        for index, (pattern, _) in enumerate(self.patterns):
            if index not in chosen:
                found.append(f"groups: '{pattern}' holds for no parameter: patterns after it match all that it matches")
        if self.decay == "weights" and not any(getattr(method, "weight_decay", 0) for method in self.methods):
            found.append("groups: decay='weights' changes nothing without weight_decay: give both, or neither")
        decayed = getattr(self.optimizer, "weight_decay", 0) and self.decay == "weights"
        if decayed and all(self._leaves_undecayed(name, self._overrides_of(name)[1]) for name in names):
            found.append(f"groups: weight_decay acts on none of the parameters that train: decay='weights' leaves {NO_WEIGHTS}")
        if self.layer_decay not in (None, 1.0) and not any(map(self._layers_above, names)):
            found.append("layerwise_decay: it changes no rate: all parameters that train are those of the last layer")
        return found

    @property
    def frozen(self) -> frozenset[str]:
        """The parameters of frozen groups; empty before the optimizer is bound."""
        return frozenset(name for name in self.infos or () if self.freezes(name))

    @property
    def methods(self) -> list[RatedOptimizer]:
        """The optimizers of all groups that are not frozen."""
        return [method for method in self._group_optimizers if method is not None]

    @property
    def slots(self) -> tuple[Slot, ...]:
        return tuple(slot for group in self.patterns for slot in slots_of(self._group_optimizer(*group)))

    def freezes(self, name: str) -> bool:
        """True if the pattern that applies to a name freezes it, even a parameter without a gradient."""
        return self._overrides_of(name)[1] == FROZEN

    def optimizer_of(self, name: str) -> RatedOptimizer | None:
        """Return the optimizer of a parameter; None if it is frozen."""
        index = self._index_of(name)
        return self._group_optimizers[-1 if index is None else index]

    def hyperparameters(self) -> dict[str, float | None]:
        """The rates in use; before the optimizer is bound, those of all groups."""
        return {
            _labelled(name, label): default
            for label, optimizer in self._used().items()
            for name, default in optimizer.hyperparameters().items()
        }

    @property
    def end(self) -> int | None:
        return min((optimizer.end for optimizer in self._used().values() if optimizer.end is not None), default=None)

    def rates(self, inputs: UpdateInputs) -> Tensors:
        """Emit the rates that the graph computes itself, before any ``lr_scale``; see ``RatedOptimizer.rates``."""
        found: Tensors = {}
        for label, optimizer in self._used().items():
            own = optimizer.rates(_seen_from(label, optimizer, inputs))
            found |= {_labelled(name, label): rate for name, rate in own.items()}
        return found

    def init(self, builder: Builder, params: Mapping[str, Tensor]) -> Tensors:
        members = self._members(tuple(params))
        state: Tensors = {}
        for label, optimizer in self._used(members).items():
            state |= {_labelled(slot, label): value for slot, value in optimizer.rate_state(builder).items()}
        for member in members:
            initial = member.optimizer.init(builder, {name: params[name] for name in member.names})
            state |= {_outside(key, member): value for key, value in initial.items()}
        return state

    def apply(self, inputs: UpdateInputs) -> tuple[Tensors, Tensors]:
        members = self._members(tuple(inputs.params))
        rates: Tensors = {}
        next_state: Tensors = {}
        for label, optimizer in self._used(members).items():
            rates[label], following = optimizer.rate(_seen_from(label, optimizer, inputs))
            next_state |= {_labelled(slot, label): value for slot, value in following.items()}
        followed: Tensors = {}
        for member in members:
            own = replace(
                inputs,
                params={name: inputs.params[name] for name in member.names},
                gradients={name: inputs.gradients[name] for name in member.names},
                state=_state_of(member.label, inputs.state),
                hyperparameters={"lr": _scaled(rates[member.rated_by], member.scale)},
            )
            updated, slots = member.optimizer.apply(own)
            followed |= updated
            next_state |= {_outside(key, member): value for key, value in slots.items()}
        return {name: followed.get(name, parameter) for name, parameter in inputs.params.items()}, next_state

    def _group_optimizer(self, pattern: str, overrides: Overrides) -> RatedOptimizer | None:
        if overrides == FROZEN:
            return None
        if isinstance(overrides, RatedOptimizer):
            return overrides
        known = [field.name for field in fields(self.optimizer)]
        if not isinstance(overrides, Mapping):
            raise ConfigurationError(
                f"groups: '{pattern}' must be 'frozen', settings such as {{'weight_decay': 0.0}}, or another plain optimizer of "
                f"burnish.optim, not {overrides!r}"
            )
        for setting in overrides:
            if setting not in (*known, LR_SCALE):
                raise ConfigurationError(
                    f"groups: '{pattern}' sets '{setting}', which {self.optimizer.name} does not have; it has "
                    f"{', '.join(known)}, and every group {LR_SCALE}"
                )
        if LR_SCALE in overrides:
            check_not_negative(f"groups: '{pattern}'", lr_scale=overrides[LR_SCALE])
            if "lr" in overrides:
                raise ConfigurationError(
                    f"groups: '{pattern}' has an lr of its own and an {LR_SCALE} of the shared one: give one of the two"
                )
        return replace(self.optimizer, **{key: value for key, value in overrides.items() if key != LR_SCALE})

    def _overrides_option(self, pattern: str, overrides: Overrides) -> Any:
        optimizer = self._group_optimizer(pattern, overrides)
        if optimizer is None or isinstance(overrides, RatedOptimizer):
            return FROZEN if optimizer is None else optimizer.options()
        settings = optimizer.options()
        return {key: settings.get(key, value) for key, value in overrides.items()}  # type: ignore[union-attr]

    def _used(self, members: Sequence[_Member] | None = None) -> dict[str, RatedOptimizer]:
        """Return label -> optimizer for the rates in use; the default group's label is empty.

        Before the optimizer is bound, and without members, it returns all of them.
        """
        if members is None and self.infos is not None:
            members = self._members(tuple(self.infos))
        rated = {"": self.optimizer}
        for pattern, overrides in self.patterns:
            optimizer = self._group_optimizer(pattern, overrides)
            if optimizer is not None and _has_own_rate(overrides):
                rated[pattern] = optimizer
        used = rated.keys() if members is None else {member.rated_by for member in members}
        return {label: optimizer for label, optimizer in rated.items() if label in used}

    @cached_property
    def _last_match(self) -> LastMatch:
        return LastMatch(pattern for pattern, _ in self.patterns)

    @cached_property
    def _group_optimizers(self) -> tuple[RatedOptimizer | None, ...]:
        """The optimizers of all groups; the last is for parameters without a match."""
        return (*(self._group_optimizer(*group) for group in self.patterns), self._group_optimizer(*NO_GROUP))

    def _overrides_of(self, name: str) -> tuple[str, Overrides]:
        index = self._index_of(name)
        return NO_GROUP if index is None else self.patterns[index]

    def _index_of(self, name: str) -> int | None:
        return max((index for each in self._names_of(name) if (index := self._last_match(each)) is not None), default=None)

    def _names_of(self, name: str) -> tuple[str, ...]:
        return (name, *self.aliases.get(name, ()))

    def _members(self, names: tuple[str, ...]) -> list[_Member]:
        chosen: dict[str, _Member] = {}
        members: dict[str, list[str]] = {}
        for name in names:
            pattern, overrides = self._overrides_of(name)
            optimizer = self.optimizer_of(name)
            if optimizer is None:
                continue
            scale = float(overrides.get(LR_SCALE, 1.0)) if isinstance(overrides, Mapping) else 1.0
            parts = [pattern] if pattern else []
            if self._leaves_undecayed(name, overrides) and (undecayed := _undecayed(optimizer)) != optimizer:
                optimizer = undecayed
                parts.append("undecayed")
            if self.layer_decay is not None and (below := self._layers_above(name)):
                scale *= self.layer_decay**below
                parts.append(f"{below} below")
            label = ",".join(parts)
            if label not in chosen:
                # The member gets its rate as an input, so the optimizer's own does not matter.
                rated_by = pattern if _has_own_rate(overrides) else ""
                chosen[label] = _Member(label, replace(optimizer, lr=1.0), rated_by, scale, ())
            members.setdefault(label, []).append(name)
        return [replace(member, names=tuple(members[label])) for label, member in chosen.items()]

    def _leaves_undecayed(self, name: str, overrides: Overrides) -> bool:
        if self.decay == "all" or (isinstance(overrides, Mapping) and "weight_decay" in overrides):
            return False
        return not decays("groups", name, self.infos)

    def _layers_above(self, name: str) -> int:
        """Return the number of layers from a parameter's to the last."""
        if self.layers is not None:
            places = [index for index, pattern in enumerate(self.layers) if matching(pattern, self._names_of(name))]
            return len(self.layers) - 1 - places[-1] if places else 0
        if self.infos is None:
            raise ConfigurationError(
                "layerwise_decay: the order of the layers is not known yet: call burnish.optim.bind with what each parameter is, "
                "as burnish.compile does, or give layers=[...]"
            )
        deepest = max(info.depth for info in self.infos.values())
        return deepest - max(self.infos[name].depth, 1) if deepest else 0


def groups(optimizer: Optimizer, patterns: Mapping[str, Overrides] | None = None, *, decay: str = "all") -> Groups:
    """Return an optimizer with settings that differ by parameter; see ``Groups``.

    Args:
        optimizer: a plain optimizer, with the settings for parameters that no pattern matches.
        patterns: initializer name (as in the file or the module) or shell-style pattern -> ``"frozen"``, the settings that differ
            (``weight_decay=0.0``, ``lr``, ``betas``, ...; ``lr_scale`` multiplies the shared rate), or another plain optimizer.
            The last match applies.
        decay: ``all``, or ``weights``: no weight decay on biases and normalization parameters, unless a pattern sets it. The
            graph determines a parameter's role.

    Raises:
        ConfigurationError: a setting that the optimizer does not have, or an optimizer that is not plain.
    """
    if patterns is not None and (not isinstance(patterns, Mapping) or not all(isinstance(key, str) for key in patterns)):
        raise ConfigurationError(f"groups: patterns must be {{pattern: settings}}, not {patterns!r}")
    return Groups(optimizer, tuple((patterns or {}).items()), decay)  # type: ignore[arg-type]


def frozen_by_pattern(optimizer: object, names: Iterable[str]) -> frozenset[str]:
    """Return the names that patterns of groups inside an optimizer freeze."""
    inside = [layer for layer in layers_of(optimizer) if isinstance(layer, Groups)]
    return frozenset(name for name in names if any(layer.freezes(name) for layer in inside))


def without_freezing(optimizer: Any, names: Collection[str], left: Collection[str]) -> Any:
    """Return an optimizer without the patterns that freeze only parameters missing from a program.

    Args:
        optimizer: an optimizer, possibly with groups inside.
        names: the missing parameters.
        left: the existing parameters.
    """
    if isinstance(optimizer, Groups):
        patterns = tuple(
            (pattern, overrides)
            for pattern, overrides in optimizer.patterns
            if overrides != FROZEN
            or select_named(pattern, left, optimizer.aliases)
            or not select_named(pattern, names, optimizer.aliases)
        )
        return replace(optimizer, patterns=patterns)
    inside = getattr(optimizer, "optimizer", None)
    return optimizer if inside is None else replace(optimizer, optimizer=without_freezing(inside, names, left))


def with_aliases(optimizer: Any, aliases: Aliases) -> Any:
    """Return an optimizer with group patterns that also match other names of the parameters.

    Args:
        optimizer: an optimizer, possibly with groups inside.
        aliases: initializer name -> its other names.
    """
    if isinstance(optimizer, Groups):
        return replace(optimizer, aliases=aliases)
    if not aliases or not any(isinstance(layer, Groups) for layer in layers_of(optimizer)):
        return optimizer
    return replace(optimizer, optimizer=with_aliases(optimizer.optimizer, aliases))


def layerwise_decay(optimizer: Optimizer, factor: float, layers: Sequence[str] | None = None) -> Groups:
    """Return an optimizer with a rate that shrinks by ``factor`` from each layer to the one before it.

    The last layer has the whole rate. Source: Howard and Ruder, "Universal language model fine-tuning for text classification",
    2018.

    Args:
        optimizer: a plain optimizer, or the result of ``groups``.
        factor: such as 0.9; not negative.
        layers: patterns of initializer names from the first layer to the last; unmatched parameters have the whole rate. By
            default the depth in the graph, counted in layers with weights.

    Raises:
        ConfigurationError: a negative or non-finite factor, layers that are not a list of patterns, or an optimizer that is not
            plain.
    """
    check_not_negative("layerwise_decay", factor=factor)
    if layers is not None and (isinstance(layers, str) or not all(isinstance(layer, str) for layer in layers)):
        raise ConfigurationError(f"layerwise_decay: layers must be a list of patterns, from the first layer on, not {layers!r}")
    grouped = optimizer if isinstance(optimizer, Groups) else groups(optimizer)
    return replace(grouped, layer_decay=factor, layers=None if layers is None else tuple(layers))


def _has(optimizer: RatedOptimizer, setting: str) -> bool:
    return any(field.name == setting for field in fields(optimizer))


def _has_own_rate(overrides: Overrides) -> bool:
    return isinstance(overrides, RatedOptimizer) or (isinstance(overrides, Mapping) and "lr" in overrides)


def _undecayed(optimizer: RatedOptimizer) -> RatedOptimizer:
    inner = {field.name: getattr(optimizer, field.name) for field in fields(optimizer)}
    changes: dict[str, Any] = {name: _undecayed(value) for name, value in inner.items() if isinstance(value, RatedOptimizer)}
    if "weight_decay" in inner:
        changes["weight_decay"] = 0.0
    return replace(optimizer, **changes)


def _labelled(name: str, label: str) -> str:
    return f"{name}:{label}" if label else name


def _seen_from(label: str, optimizer: RatedOptimizer, inputs: UpdateInputs) -> UpdateInputs:
    """Return the inputs with state and scalars under the names that a group's optimizer uses."""
    scalars = {name: inputs.hyperparameters[_labelled(name, label)] for name in optimizer.hyperparameters()}
    return replace(inputs, state=_state_of(label, inputs.state), hyperparameters=scalars)


def _state_of(label: str, state: Mapping[str, Tensor]) -> Tensors:
    """Return the state with a group's separate entries under their plain names."""
    if not label:
        return dict(state)
    ending = f":{label}"
    return {**state, **{key.removesuffix(ending): value for key, value in state.items() if key.endswith(ending)}}


def _outside(key: str, member: _Member) -> str:
    slot, _, name = key.partition("/")
    return key if name in member.names else _labelled(slot, member.label)


def _scaled(rate: Tensor, scale: float) -> Tensor:
    return rate if scale == 1.0 else double(rate) * scale
