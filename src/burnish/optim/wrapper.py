"""What optimizers that go around another one share."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, fields, replace
from typing import Any, TypeVar

from burnish.errors import ConfigurationError
from burnish.graph import Builder, Tensor
from burnish.optim.base import Optimizer, Scheduled, Tensors
from burnish.optim.parameters import Infos, MayDoNothing, bind, frozen_parameters
from burnish.settings import PlainSettings

Self = TypeVar("Self", bound="Wrapper")


@dataclass(frozen=True)
class Wrapper(PlainSettings):
    """An optimizer around another one, whose hyperparameters and frozen parameters it hands on.

    A subclass adds its settings as fields, each with a JSON-compatible value, and the methods ``init`` and ``update``.
    """

    optimizer: Optimizer

    def __post_init__(self) -> None:
        if isinstance(self.optimizer, type) or not isinstance(self.optimizer, Optimizer):
            raise ConfigurationError(
                f"{self.name}: it goes around an optimizer of burnish.optim, such as burnish.optim.sgd(), not {self.optimizer!r}"
            )

    @property
    def name(self) -> str:
        raise NotImplementedError

    def hyperparameters(self) -> dict[str, float | None]:
        return self.optimizer.hyperparameters()

    @property
    def end(self) -> int | None:
        """The first step that a schedule inside is not defined for; None where none has an end."""
        return self.optimizer.end if isinstance(self.optimizer, Scheduled) else None

    def rates(
        self, builder: Builder, step: Tensor, state: Mapping[str, Tensor], hyperparameters: Mapping[str, Tensor]
    ) -> Tensors:
        """Emit the rates that the graph computes itself; see ``RatedOptimizer.rates``."""
        inside = self.optimizer
        return inside.rates(builder, step, state, hyperparameters) if isinstance(inside, Scheduled) else {}

    def options(self) -> dict[str, Any]:
        settings = {field.name: getattr(self, field.name) for field in fields(self) if field.name != "optimizer"}
        return {"name": self.name, **settings, "optimizer": self.optimizer.options()}

    def bind(self: Self, infos: Infos) -> Self:
        return replace(self, optimizer=bind(self.optimizer, infos))

    @property
    def frozen(self) -> frozenset[str]:
        return frozen_parameters(self.optimizer)


def layers_of(optimizer: object) -> Iterator[object]:
    """The optimizer and those inside it, from the outermost."""
    while optimizer is not None:
        yield optimizer
        optimizer = getattr(optimizer, "optimizer", None)


def options_without_effect(optimizer: object, names: Collection[str]) -> list[str]:
    """Return which options of a bound optimizer change nothing of the parameters that it updates, as sentences."""
    parts = [part for layer in layers_of(optimizer) for part in (layer, *getattr(layer, "transforms", ()))]
    found = [sentence for part in parts if isinstance(part, MayDoNothing) for sentence in part.without_effect(names)]
    methods = next((part.methods for part in parts if hasattr(part, "methods")), parts[-1:])
    for method in methods:
        for setting, needed in getattr(method, "needs", {}).items():
            is_read = any(getattr(each, setting, 0) and getattr(each, needed, 0) for each in methods)
            if getattr(method, setting) and not is_read:
                found.append(f"{method.name}: {setting} changes nothing without {needed}: give both, or neither")
    return [*dict.fromkeys(found)]


def check_once(optimizer: Wrapper, *kinds: type) -> None:
    """Raise ConfigurationError where a wrapper goes around another of its kinds: their state would have the same names."""
    for inner in layers_of(optimizer.optimizer):
        if isinstance(inner, kinds):
            raise ConfigurationError(
                f"{optimizer.name}: the optimizer inside is already wrapped in {inner.name}, and both would keep state of the "  # type: ignore[attr-defined]
                "same name: leave one of them out"
            )
