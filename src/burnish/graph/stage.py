"""Passes, and the stages that list them: which rewrites a model goes through, in which order, when, and what each of them did.

A pass changes a model in place and says whether it did. A stage runs its passes one after another, and restores what they leave
open: names, shapes or the order of nodes, by its list ``restores``. ``burnish passes`` prints the stages. In tests,
``BURNISH_VERIFY_PASSES=1`` has the model verified after every pass, so that a wrong one fails by its name.
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
"""What the passes of a stage are told, a frozen dataclass: of the target, the mode, the policies. Facts that a pass finds are
marks on the graph."""

VERIFY = "BURNISH_VERIFY_PASSES"


def always(model: ir.Model, context: Any) -> bool:
    """The condition of a pass that runs for every model and target."""
    return True


@dataclass(frozen=True)
class Pass(Generic[C]):
    """A rewrite of a model.

    Attributes:
        name: in the words of the field, verb first.
        apply: changes the model in place, and returns whether it did.
        when: says for which target and graph (``model.graph.name``) it runs.
        local: whether it names what it emits and gives it dtypes and shapes, so that nothing has to be restored.
        settled: whether it reads shapes that a pass before it may have opened: in a ``Repeat`` it waits for a round in which none
            changed anything.
        operators: types of nodes, and domains. If a model has none of them, in bodies and functions either, the pass changes
            nothing and is skipped. Empty for a pass that any model may need.
        counted: whether a round of a ``Repeat`` counts in which it changed something. One that ends by itself need not.
        reason: why it is our own where onnx_ir has a pass for the same; empty where it has none.
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
    """A pass that is told nothing, named as its function. ``options`` are fields of ``Pass``."""
    return Pass(apply.__name__, lambda model, _: apply(model), **options)


def rewrite_graph(apply: Callable[[ir.Graph], bool], **options: Any) -> Pass[Any]:
    """A pass over the main graph that is told nothing, named as its function. ``options`` are fields of ``Pass``."""
    return Pass(apply.__name__, lambda model, _: apply(model.graph), **options)


def note(apply: Callable[[ir.Model], object], **options: Any) -> Pass[Any]:
    """A pass that checks, or that notes a fact with nodes and values, and changes neither."""

    def noted(model: ir.Model, context: Any) -> bool:
        apply(model)
        return False

    return Pass(apply.__name__, noted, local=True, **options)


@dataclass(frozen=True)
class Repeat(Generic[C]):
    """Passes that run again until none changes anything; names and shapes are restored after each round."""

    passes: Sequence[Pass[C]]
    at_most: int
    when: Callable[[ir.Model, C], bool] = always


@dataclass(frozen=True)
class Fallback(Generic[C]):
    """A pass that may fail, and those that repair what it fails at.

    Attributes:
        attempt: is run; it leaves the model as it was where it raises ``error``.
        error: what it raises.
        repairs: run then. If they change something, ``attempt`` runs again; if not, its error stands.
    """

    attempt: Pass[C]
    error: type[Exception]
    repairs: Sequence[Pass[C]]


Element: TypeAlias = "Pass[C] | Repeat[C] | Fallback[C]"


@dataclass(frozen=True)
class PassRecord:
    """What a pass did to a model.

    Attributes:
        name: of the pass.
        changed: whether it changed something.
        seconds: how long it ran, with what it left to restore.
        note: how many nodes there were before and after, and why patterns did not match.
    """

    name: str
    changed: bool
    seconds: float
    note: str = ""


@dataclass(frozen=True)
class Stage(Generic[C]):
    """A list of passes.

    Attributes:
        name: of the stage.
        passes: in their order.
        restores: what restores names and shapes after a pass that changed something and is not ``local``. None: the passes of
            this stage name and type what they emit.
        settles: whether names, order, dtypes and shapes hold after each pass and what restores them: not before they are known,
            nor where a pass of the stage orders what the ones before it emit.
    """

    name: str
    passes: Sequence[Element[C]]
    restores: Stage[C] | None = None
    settles: bool = True

    def run(self, model: ir.Model, context: C) -> list[PassRecord]:
        """Run the passes on a model, in place, and return what each did.

        Raises:
            BurnishError: what a pass refuses.
            PassError: a pass left the model wrong; raised in tests alone.
        """
        run = _Run(self, model, context)
        run.elements(self.passes)
        if (observer := _observer.get()) is not None:
            observer(self.name, model, run.records)
        return run.records

    def every_pass(self) -> Iterator[Pass[C]]:
        """The passes of the stage, in the order in which they run first."""
        for element in self.passes:
            yield from passes_of(element)


Observer = Callable[[str, ir.Model, list[PassRecord]], object]
_observer: ContextVar[Observer | None] = ContextVar("_observer", default=None)


@contextmanager
def observing(observer: Observer) -> Iterator[None]:
    """Call ``observer(stage, model, records)`` after each stage that runs within; records then have notes."""
    token = _observer.set(observer)
    try:
        yield
    finally:
        _observer.reset(token)


def passes_of(element: Element[C]) -> Iterator[Pass[C]]:
    """The passes that an element of a stage holds."""
    if isinstance(element, Pass):
        yield element
    elif isinstance(element, Repeat):
        yield from element.passes
    else:
        yield element.attempt
        yield from element.repairs


class _Run(Generic[C]):
    """One run of a stage over a model."""

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
        """Restore what passes that changed something left open; the time counts as the last one's."""
        self.present = None
        if self.stage.restores is not None and not all(item.local for item in changed):
            last, start = self.records.pop(), perf_counter()
            _Run(self.stage.restores, self.model, self.context).elements(self.stage.restores.passes)
            self.records.append(replace(last, seconds=last.seconds + perf_counter() - start))
        if self.verification is not None and self.stage.settles:
            self.verification.settled(" and ".join(item.name for item in changed))

    def operators(self) -> frozenset[str]:
        """Return the types of the nodes of the model, in bodies and functions too, and their domains."""
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
        """Run a pass, unless none of its operators is there; return whether it changed something.

        Where the model is verified it runs all the same, and must change nothing.
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
