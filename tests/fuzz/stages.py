"""A mutant's way through burnish: loaded, compiled, differentiated, saved, and trained for one step."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from pathlib import Path
from random import Random
from typing import Any, TypeVar

import numpy as np
import onnx

import burnish
from burnish.program import Role
from fuzz.mutants import Mutant
from fuzz.outcomes import DEFECTS, Kind, Outcome, kind_of, place_of
from fuzz.seeds import MODEL

LOSSES = (*["mse"] * 8, *["cross_entropy"] * 4, "bce_with_logits", "l1", "huber", "nll", "kl_divergence", "hinge", "ctc", "focal")
OPTIMIZERS = ("sgd", "sgd:momentum=0.9", "adamw", "rmsprop", "lamb", "adafactor", "muon")
NORMALIZATIONS = ("train", "train", "frozen", "frozen:all", "sync", "ghost:1", "renorm")
PRECISIONS = (*["float32"] * 8, "bfloat16", "float16")
ENGINES = ("onnxruntime", "reference")
EXTENT = 2
"""What symbolic dimensions stand for in a batch."""

MOST_DIMENSIONS = 32
"""Of what arrays can have."""

Result = TypeVar("Result")


class Course:
    """The stages of one case.

    Args:
        mutant: what is put through.
        folder: an empty one, for what has to be on disk.
        on_error: is told of every exception.
    """

    def __init__(self, mutant: Mutant, folder: Path, on_error: Callable[[BaseException], object] = lambda error: None):
        self.mutant = mutant
        self.folder = folder
        self.on_error = on_error
        self.random = mutant.options
        self.outcome = Outcome(-1, mutant.seed, Kind.LOADED)
        self.stage = ""

    def run(self, number: int, far: bool) -> Outcome:
        """Go through the stages; ``far``: beyond the first one."""
        start = time.perf_counter()
        self.outcome.number = number
        source = self.mutant.source(self.folder)
        if self.mutant.is_program:
            program = self.attempt("load program", lambda: burnish.Program.load(source))
            self._train(program)
        else:
            model = self.attempt("load", lambda: burnish.load(source))
            if far and model is not None:
                self._differentiate(source, model)
                program = self._compile(source, model)
                self._save(program)
                self._train(program)
            elif far and self.mutant.seed == "training information":
                self.attempt("load program", lambda: burnish.Program.load(self._file(source)))
        self.outcome.seconds = round(time.perf_counter() - start, 3)
        return self.outcome

    def attempt(self, stage: str, call: Callable[[], Result], refusal: Kind = Kind.REFUSED) -> Result | None:
        """Call something and note what it raises; ``refusal``: what a refusal means here."""
        self.stage = stage
        try:
            return call()
        except Exception as error:
            kind = kind_of(error)
            self._note(refusal if kind is Kind.REFUSED else kind, error)
            return None

    def _note(self, kind: Kind, error: BaseException) -> None:
        self.on_error(error)
        held = self.outcome
        if held.is_defect or (held.kind is Kind.REFUSED and kind not in DEFECTS):
            return
        held.kind, held.stage, held.error = kind, self.stage, type(error).__name__
        held.message = " ".join(str(error).split())[:600].encode("utf-8", "replace").decode()
        held.place = place_of(error)

    def _file(self, source: Any) -> Any:
        if isinstance(source, Path | onnx.ModelProto):
            return source
        path = self.folder / "read.onnx"
        path.write_bytes(self.mutant.files[MODEL])
        return path

    def _differentiate(self, source: Any, model: Any) -> None:
        names = [value.name for value in (*model.graph.inputs, *model.graph.initializers.values())]
        outputs = [value.name for value in model.graph.outputs]
        if names and outputs:
            wrt = self.random.sample(names, min(len(names), self.random.randint(1, 3)))
            of = self.random.choice(outputs)
            self.attempt("grad", lambda: burnish.grad(source, wrt, of))
            self._unless_defect()

    def _unless_defect(self) -> None:
        """A refusal of the gradient says nothing of what compilation will say."""
        if not self.outcome.is_defect:
            self.outcome = Outcome(self.outcome.number, self.outcome.seed, Kind.LOADED)

    def _compile(self, source: Any, model: Any) -> burnish.Program | None:
        random = self.random
        weights = list(model.graph.initializers)
        outputs = [value.name for value in model.graph.outputs]
        options: dict[str, Any] = {
            "loss": random.choice(LOSSES),
            "optimizer": random.choice(OPTIMIZERS),
            "norm": random.choice(NORMALIZATIONS),
            "precision": random.choice(PRECISIONS),
            "trainable": [random.choice(weights)] if weights and random.random() < 0.4 else None,
            "outputs": random.choice(outputs) if len(outputs) > 1 else None,
            "recompute": random.choice((*[None] * 8, "layers", "100KB")),
        }
        if outputs and random.random() < 0.1:
            options |= {"loss": "cross_entropy", "outputs": None, "output": random.choice(outputs)}

        def compile() -> burnish.Program:
            program = burnish.compile(source, **options)
            assert all(graph.graph is not None for graph in program.graphs.values())  # those that wait are made now
            return program

        return self.attempt("compile", compile)

    def _save(self, program: burnish.Program | None) -> None:
        if program is None or self.random.random() < 0.7:
            return
        folder = self.folder / "saved"
        if self.attempt("save", lambda: program.save(folder)) is not None:
            self.attempt("load saved", lambda: burnish.Program.load(folder), Kind.UNREADABLE)
        one = self.attempt("to_onnx", program.to_onnx)
        if one is not None:
            self.attempt("load to_onnx", lambda: burnish.Program.load(one), Kind.UNREADABLE)

    def _train(self, program: burnish.Program | None) -> None:
        if program is None:
            return
        engine = self.random.choice(ENGINES)
        session = self.attempt("open", lambda: burnish.Session(program, engine=engine, threads=1))
        if session is None:
            return
        batch = _batch(program.signature["step"].inputs_of(Role.DATA, Role.LABEL), self.random)
        if self.attempt("step", lambda: session.step(batch)) is not None and self.outcome.kind is Kind.LOADED:
            self.outcome.kind = Kind.TRAINED
        if self.random.random() < 0.2:
            self.attempt("export", lambda: session.export(self.folder / "tuned.onnx"))


def _batch(entries: Any, random: Random) -> Mapping[str, np.ndarray]:
    """Arrays of the shapes that a program asks for; the worst that can come of wrong ones is an InputError."""
    generator = np.random.default_rng(random.randrange(1 << 30))
    batch = {}
    for entry in entries:
        extents = [extent if isinstance(extent, int) and 0 <= extent <= 1 << 10 else EXTENT for extent in entry.shape or ()]
        if len(extents) > MOST_DIMENSIONS:
            extents = []
        dtype = entry.numpy_dtype
        if dtype.kind in "iub":
            low, high = entry.minimum or 0, 2 if entry.maximum is None else entry.maximum + 1
            array = generator.integers(low, max(high, low + 1), extents)
        else:
            array = generator.uniform(-1 if entry.minimum is None else entry.minimum, 1, extents)
        batch[entry.name] = array.astype(dtype)
    return batch
