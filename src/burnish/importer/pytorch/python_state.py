"""Python state that a call of a module may change: attributes of its parts, and random generators."""

from __future__ import annotations

import copy
import functools
import random
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch.utils import _pytree as pytree

OWN = frozenset(torch.nn.Module().__dict__)
"""Attributes that PyTorch gives every module."""

OF_RECURRENCE = "_flat_weight"
"""Prefix of the attributes with the flat weights of PyTorch's recurrent layers."""

GENERATORS = (random.Random, np.random.Generator, np.random.RandomState)

EXTREME = 300
"""Number of initial random words set to the smallest or largest value."""


class PythonState:
    """Python state of a module, other than tensors. As a context manager it restores the state at exit.

    Args:
        module: the module; attributes of its submodules count too.

    Attributes:
        changed: attributes that differed at the last ``note``.
        computed: changed attributes that were tensors with a gradient.
        drew: True if random numbers were drawn in Python or NumPy.
        refilled: lists, dictionaries and sets in attributes that had changed, with their contents.
    """

    def __init__(self, module: torch.nn.Module):
        self._parts = [(name, part.__dict__) for name, part in module.named_modules()]
        self._attributes = [dict(attributes) for _, attributes in self._parts]
        values = [value for attributes in self._attributes for name, value in attributes.items() if name not in OWN]
        self._containers = [(value, copy.copy(value)) for value in values if isinstance(value, list | dict | set | deque)]
        self._generators = [(leaf, _state_of(leaf)) for leaf in pytree.tree_leaves(values) if isinstance(leaf, GENERATORS)]
        self._python, self._numpy = random.getstate(), _numpy_state()
        self.changed: dict[str, tuple[Mapping[str, Any], str, Any]] = {}
        self.computed: tuple[str, ...] = ()
        self.drew = False
        self.refilled: list[tuple[Any, Any]] = []

    def __enter__(self) -> PythonState:
        return self

    def __exit__(self, *_: object) -> None:
        self.restore()

    def note(self) -> None:
        """Record the changes since the start: the effects of a call."""
        computed = []
        for (part, now), before in zip(self._parts, self._attributes, strict=True):
            for name in (now.keys() | before.keys()) - OWN - {"forward"}:
                value = now.get(name)
                if not name.startswith(OF_RECURRENCE) and not is_same(value, before.get(name)):
                    place = f"{part}.{name}" if part else name
                    self.changed[place] = (now, name, value)
                    if any(isinstance(leaf, torch.Tensor) and leaf.requires_grad for leaf in pytree.tree_leaves(value)):
                        computed.append(place)
        self.computed = tuple(sorted(computed))
        self.refilled = [(container, copy.copy(container)) for container, before in self._containers if container != before]
        generators = any(repr(_state_of(generator)) != repr(state) for generator, state in self._generators)
        self.drew = generators or random.getstate() != self._python or _words(_numpy_state()) != _words(self._numpy)

    def restore(self) -> None:
        for (_, now), before in zip(self._parts, self._attributes, strict=True):
            for name in now.keys() - before.keys() - OWN:
                del now[name]
            now.update({name: value for name, value in before.items() if name not in OWN})
        for container, contents in self._containers:
            _refill(container, contents)
        for generator, state in self._generators:
            _set_state(generator, state)
        random.setstate(self._python)
        _set_numpy_state(self._numpy)

    def others(self) -> Iterator[tuple[str, Callable[[], Any]]]:
        """Yield states that another call may start from, as pairs of a reason and a context that sets the state."""
        counted = {place: entry for place, entry in self.changed.items() if _is_plain(entry[2])}
        refilled = [(container, contents) for container, contents in self.refilled if _is_plain(contents)]
        if counted or refilled:
            place = f"its attribute '{next(iter(counted))}'" if counted else f"a {type(refilled[0][0]).__name__} of its own"
            yield (
                (
                    f"forward changes {place} at each call, and what it computes depends on that: in a graph it would be "
                    "a constant. Hold it in a buffer (register_buffer), which a graph reads and writes, or give it as a tensor"
                ),
                lambda: self._as_left(counted, refilled),
            )
        if self.drew:
            for word in (0, 0xFFFFFFFF):
                yield (
                    (
                        "forward draws random numbers in Python or NumPy, and what it computes depends on them: in a graph "
                        "they would be constants. Draw by PyTorch (torch.rand), and choose by torch.where"
                    ),
                    functools.partial(self._with_draws, word),
                )

    @contextmanager
    def _as_left(self, counted: Mapping[str, tuple[Any, str, Any]], refilled: Sequence[tuple[Any, Any]]) -> Iterator[None]:
        try:
            for container, contents in refilled:
                _refill(container, contents)
            for attributes, name, value in counted.values():
                attributes[name] = value
            yield
        finally:
            self.restore()

    @contextmanager
    def _with_draws(self, word: int) -> Iterator[None]:
        try:
            words = [_before_tempering(word)] * EXTREME + [int(each) for each in self._numpy[1][EXTREME:]]
            random.setstate((self._python[0], (*words, 0), None))
            _set_numpy_state(("MT19937", np.asarray(words, np.uint32), 0))
            for generator, _ in self._generators:
                if isinstance(generator, random.Random):
                    generator.setstate(random.getstate())
                elif isinstance(generator, np.random.RandomState):
                    generator.set_state(_numpy_state())
                else:
                    generator.random(7 if word else 1)
            yield
        finally:
            self.restore()


def _is_plain(value: Any) -> bool:
    """True if a value can reach the next call: not if a trace computed it."""
    return all(
        not isinstance(leaf, torch.Tensor | torch.SymInt | torch.SymFloat | torch.SymBool) for leaf in pytree.tree_leaves(value)
    )


def is_same(value: Any, other: Any) -> bool:
    """True if two attributes are equal; False if they cannot be compared."""
    if value is other:
        return True
    try:
        return type(value) is type(other) and bool(value == other)
    except Exception:
        return False


def _numpy_state() -> Any:
    return np.random.get_state()  # noqa: NPY002 - what is looked at is the generator that all of NumPy's old functions share


def _set_numpy_state(state: Any) -> None:
    np.random.set_state(state)  # noqa: NPY002


def _words(state: Any) -> Any:
    return state[1].tobytes(), state[2:]


def _refill(container: Any, contents: Any) -> None:
    if container != contents:
        container.clear()
        (container.extend if isinstance(container, list | deque) else container.update)(contents)


def _state_of(generator: Any) -> Any:
    if isinstance(generator, random.Random):
        return generator.getstate()
    return copy.deepcopy(generator.bit_generator.state if isinstance(generator, np.random.Generator) else generator.get_state())


def _set_state(generator: Any, state: Any) -> None:
    if isinstance(generator, random.Random):
        generator.setstate(state)
    elif isinstance(generator, np.random.Generator):
        generator.bit_generator.state = state
    else:
        generator.set_state(state)


def _before_tempering(word: int) -> int:
    word ^= word >> 18
    word ^= (word << 15) & 0xEFC60000
    first = word
    for _ in range(5):
        word = first ^ ((word << 7) & 0x9D2C5680)
    first = word & 0xFFFFFFFF
    word = first
    for _ in range(3):
        word = first ^ (word >> 11)
    return word & 0xFFFFFFFF
