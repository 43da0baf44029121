"""Passes, and stages that list them: the rewrites of a model, their order and conditions, and records of their effects.

A pass changes a model in place and returns True if it did. A stage runs its passes in order and then restores names, shapes or
the order of nodes by its list ``restores``. ``burnish passes`` prints the stages. ``BURNISH_VERIFY_PASSES=1`` verifies the model
after every pass, so that tests name a faulty one.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, replace
from time import perf_counter
from typing import Any, Generic, TypeAlias, TypeVar

import onnx_ir as ir

from burnish.graph.attributes import bodies
from burnish.graph.matching import near_misses
from burnish.graph.verification import Verification

C = TypeVar("C")
"""Context of a stage's passes, a frozen dataclass: the target, the mode, the policies. Facts found by passes are annotations of
the graph.
"""

VERIFY = "BURNISH_VERIFY_PASSES"


def always(model: ir.Model, context: Any) -> bool:
    """Return True: the condition of a pass that always runs."""
    return True


@dataclass(frozen=True)
class Pass(Generic[C]):
    """A rewrite of a model.

    Attributes:
        name: name in the field's usual terms, starting with a verb.
        apply: changes the model in place and returns True if it did.
        when: condition on the target and the graph (``model.graph.name``).
        local: True if it sets names, dtypes and shapes itself, so that nothing must be restored.
        settled: True if it reads shapes that an earlier pass may have opened. In a ``Repeat`` it waits for a round without
            changes.
        operators: operator types and domains. The pass is skipped if the model, including bodies and functions, has none of them.
            Empty if any model may need the pass.
        counted: True if its changes count as a round of a ``Repeat``. Not needed for a pass that terminates by itself.
        reason: reason for our own version if onnx_ir has such a pass; empty otherwise.
    """

    name: str
    apply: Callable[[ir.Model, C], bool]
    when: Callable[[ir.Model, C], bool] = always
    local: bool = False
    settled: bool = False
    operators: Collection[str] = ()
    counted: bool = True
    reason: str = ""

    def __str__(self) -> str:
        return self.name


def rewrite(apply: Callable[[ir.Model], bool], **options: Any) -> Pass[Any]:
    """Return a pass without context, named after its function. ``options`` are fields of ``Pass``."""
    return Pass(apply.__name__, lambda model, _: apply(model), **options)


def rewrite_graph(apply: Callable[[ir.Graph], bool], **options: Any) -> Pass[Any]:
    """Return a pass over the main graph without context, named after its function. ``options`` are fields of ``Pass``."""
    return Pass(apply.__name__, lambda model, _: apply(model.graph), **options)


def note(apply: Callable[[ir.Model], object], **options: Any) -> Pass[Any]:
    """Return a pass that checks or annotates a model without changing nodes or values."""

    def noted(model: ir.Model, context: Any) -> bool:
        apply(model)
        return False

    return Pass(apply.__name__, noted, local=True, **options)


@dataclass(frozen=True)
class Repeat(Generic[C]):
    """Passes that run again until none changes anything. Names and shapes are restored after each round."""

    passes: Sequence[Pass[C]]
    at_most: int
    when: Callable[[ir.Model, C], bool] = always


@dataclass(frozen=True)
class Fallback(Generic[C]):
    """A pass that may fail, with repairs to apply before a second attempt.

    Attributes:
        attempt: the pass; it leaves the model unchanged if it raises ``error``.
        error: its exception.
        repairs: passes that run after a failure. If they change something, ``attempt`` runs again; otherwise the error is raised.
    """

    attempt: Pass[C]
    error: type[Exception]
    repairs: Sequence[Pass[C]]


Element: TypeAlias = "Pass[C] | Repeat[C] | Fallback[C]"


@dataclass(frozen=True)
class PassRecord:
    """The effect of a pass on a model.

    Attributes:
        name: name of the pass.
        changed: True if it changed something.
        seconds: run time, including restoration.
        note: node counts before and after, and why patterns did not match.
    """

    name: str
    changed: bool
    seconds: float
    note: str = ""


@dataclass(frozen=True)
class Stage(Generic[C]):
    """A list of passes.

    Attributes:
        name: name of the stage.
        passes: the passes, in order.
        restores: stage that restores names and shapes after a pass that changed something and is not ``local``. None: the passes
            of this stage set them.
        settles: True if names, order, dtypes and shapes are valid after each pass and its restoration. False for stages before
            they are known, or with a pass that sorts nodes emitted by earlier ones.
    """

    name: str
    passes: Sequence[Element[C]]
    restores: Stage[C] | None = None
    settles: bool = True

    def run(self, model: ir.Model, context: C) -> list[PassRecord]:
        """Run the passes on a model, in place, and return their records.

        Raises:
            BurnishError: a pass refuses the model.
            PassError: a pass left the model wrong; only in tests.
        """
        run = _Run(self, model, context)
        run.elements(self.passes)
        if (observer := _observer.get()) is not None:
            observer(self.name, model, run.records)
        return run.records

    def every_pass(self) -> Iterator[Pass[C]]:
        """Yield the passes of the stage in order of their first run."""
        for element in self.passes:
            yield from passes_of(element)


Observer = Callable[[str, ir.Model, list[PassRecord]], object]
_observer: ContextVar[Observer | None] = ContextVar("_observer", default=None)


@contextmanager
def observing(observer: Observer) -> Iterator[None]:
    """Call ``observer(stage, model, records)`` after each stage within this context; records then have notes."""
    token = _observer.set(observer)
    try:
        yield
    finally:
        _observer.reset(token)


def passes_of(element: Element[C]) -> Iterator[Pass[C]]:
    if isinstance(element, Pass):
        yield element
    elif isinstance(element, Repeat):
        yield from element.passes
    else:
        yield element.attempt
        yield from element.repairs


class _Run(Generic[C]):
    def __init__(self, stage: Stage[C], model: ir.Model, context: C):
        self.stage = stage
        self.model = model
        self.context = context
        self.records: list[PassRecord] = []
        self.takes_notes = _observer.get() is not None
        self.present: frozenset[str] | None = None  # types and domains of nodes; None if they may have changed
        self.verification = Verification(stage.name, model) if os.environ.get(VERIFY) == "1" else None

    def elements(self, elements: Sequence[Element[C]]) -> None:
        for element in elements:
            if isinstance(element, Repeat):
                self.repeat(element)
            elif isinstance(element, Fallback):
                self.fall_back(element)
            elif self.changes(element):
                self.restore([element])

    def repeat(self, repeat: Repeat[C]) -> None:
        rounds = 0
        while rounds < repeat.at_most and repeat.when(self.model, self.context):
            changed: list[Pass[C]] = []
            for item in repeat.passes:
                if not (item.settled and changed) and self.changes(item):
                    changed.append(item)
            if not changed:
                return
            if all(item.counted for item in changed):
                rounds += 1
            self.restore(changed)

    def fall_back(self, fallback: Fallback[C]) -> None:
        try:
            changed = self.changes(fallback.attempt)
        except fallback.error:
            if not any([self.changes(item) for item in fallback.repairs]):
                raise
            changed = self.changes(fallback.attempt)
        if changed:
            self.restore([fallback.attempt])

    def restore(self, changed: Sequence[Pass[C]]) -> None:
        self.present = None
        if self.stage.restores is not None and not all(item.local for item in changed):
            last, start = self.records.pop(), perf_counter()
            _Run(self.stage.restores, self.model, self.context).elements(self.stage.restores.passes)
            self.records.append(replace(last, seconds=last.seconds + perf_counter() - start))
        if self.verification is not None and self.stage.settles:
            self.verification.settled(" and ".join(item.name for item in changed))

    def operators(self) -> frozenset[str]:
        if self.present is None:
            found: set[str] = set()
            pending: list[ir.Graph | ir.Function] = [self.model.graph, *self.model.functions.values()]
            while pending:
                for node in pending.pop():
                    found.add(node.op_type)
                    if node.domain:
                        found.add(node.domain)
                    pending += bodies(node)
            self.present = frozenset(found)
        return self.present

    def changes(self, item: Pass[C]) -> bool:
        """Run a pass unless the model has none of its operators; return True if it changed something.

        Under verification such a pass still runs, and must change nothing.
        """
        is_idle = bool(item.operators) and self.operators().isdisjoint(item.operators)
        if (is_idle and self.verification is None) or not item.when(self.model, self.context):
            return False
        before, start = len(self.model.graph), perf_counter()
        if self.takes_notes:
            with near_misses() as misses:
                changed = item.apply(self.model, self.context)
        else:
            changed, misses = item.apply(self.model, self.context), []
        seconds, after = perf_counter() - start, len(self.model.graph)
        changed = changed and not is_idle
        if changed:
            self.present = None
        counts = [f"{before} -> {after} nodes"] if after != before else []
        self.records.append(PassRecord(item.name, changed, seconds, "; ".join([*counts, *misses])))
        if self.verification is not None:
            self.verification.ran(item.name, changed, self.stage.settles)
        return changed
