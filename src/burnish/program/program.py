"""The program itself: six graphs, their signature and the initial state."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import onnx
import onnx_ir as ir

from burnish.errors import ConfigurationError
from burnish.graph import garbage_kept
from burnish.program.signature import FEATURES, GRAPH_NAMES, GraphSignature, Role, Signature
from burnish.program.state import LazyArrays, Weights
from burnish.targets import Target
from burnish.validation import is_whole

if TYPE_CHECKING:
    from burnish.analysis.memory_plan import PlannedPeak
    from burnish.compiler.lowered_graphs import LoweredGraphs
    from burnish.importer import SourceModel
    from burnish.optim import Optimizer
    from burnish.program.carry_over import CarriedState


__all__ = ["GRAPH_NAMES", "Program"]


@dataclass(repr=False)
class Program:
    """A training program: pure graphs over explicit state, in standard ONNX operators.

    Attributes:
        graphs: the six graphs by name, and ``features`` where there is one, each lowered when it is first read.
        weights: the source's parameters and statistics, by state name (``param/...``, ``stat/...``); see ``release_weights``.
        source: the model that it was made of, as it came, which takes its weights from the state; None for a program that was
            made of none, or read from one ONNX file.
        saved_state: the state that came with a program in one ONNX file, to train on from there: ``Session(program,
            state=program.saved_state)``; else None.
    """

    graphs: LoweredGraphs
    weights: Mapping[str, np.ndarray]
    source: SourceModel | None = field(default=None, compare=False)
    saved_state: Mapping[str, np.ndarray] | None = field(default=None, init=False)

    def __repr__(self) -> str:
        """The graphs by their numbers of nodes; none is lowered for it."""
        return f"Program({self.graphs!r})"

    def _repr_html_(self) -> str:
        from burnish.training.cells import cell

        return cell("Program", self.overview())

    def overview(self) -> list[tuple[str, str]]:
        """Return names and values: the inputs, the size of the parameters, loss, optimizer, metrics and precision."""
        from burnish.training.cells import text_of

        step = self.signature["step"]
        parameters = [entry.extents for entry in step.inputs_of(Role.PARAMETER)]
        numbers = sum(math.prod(extent for extent in extents if isinstance(extent, int)) for extents in parameters)
        inputs = [f"{entry.name} [{', '.join(map(str, entry.extents))}]" for entry in step.inputs_of(Role.DATA, Role.LABEL)]
        rows = [("inputs", ", ".join(inputs)), ("parameters", f"{numbers:,} numbers in {len(parameters):,} tensors")]
        said = [(name, self.options.get(name)) for name in ("loss", "optimizer", "metrics", "precision")]
        return rows + [(name, text_of(value)) for name, value in said if value]

    @property
    def init(self) -> ir.Model:
        """(seed, param/*) -> opt/*, rng/key, step: the state that training starts from, beside the model's own."""
        return self.graphs["init"]

    @property
    def step(self) -> ir.Model:
        """One training step: ``grad`` and then ``apply``, in one graph; returns the learning rate too where it computes it."""
        return self.graphs["step"]

    @property
    def grad(self) -> ir.Model:
        """(data, label, param/*, stat/*, rng/key, step) -> loss, metrics, grad:*, next statistics, next key."""
        return self.graphs["grad"]

    @property
    def apply(self) -> ir.Model:
        """(param/*, grad:*, opt/*, step, hyperparameters) -> next parameters, next optimizer state, next step."""
        return self.graphs["apply"]

    @property
    def evaluate(self) -> ir.Model:
        """(data, label, param/*, stat/*) -> loss and metrics, and for each ``sum:<name>`` and ``count:<name>``.

        From these a data set's figures are added up exactly.
        """
        return self.graphs["evaluate"]

    @property
    def predict(self) -> ir.Model:
        """(data, param/*, stat/*) -> the outputs of the model, under their own names."""
        return self.graphs["predict"]

    @property
    def features(self) -> ir.Model | None:
        """(data) -> what the frozen part of the model computes, which ``step``, ``grad`` and ``evaluate`` then take for data.

        None for a program that was compiled without ``cached_features``.
        """
        return self.graphs.get(FEATURES)

    @property
    def signature(self) -> Signature:
        """Every input and output of every graph."""
        return self.graphs.signature

    @property
    def options(self) -> dict[str, Any]:
        """What the program was compiled with, as JSON-compatible values: loss, optimizer, norm, metrics."""
        return self.graphs.options

    @property
    def semantic(self) -> Mapping[str, ir.Model]:
        """``grad``, ``evaluate`` and ``predict`` before they were lowered, and before activations are computed again.

        They are for engines with kernels of their own; empty where there are none.
        """
        return self.graphs.semantic

    @property
    def target(self) -> Target:
        """The runtime that the graphs are lowered for."""
        return self.graphs.target

    @property
    def optimizer(self) -> Optimizer | None:
        """What updates the parameters, as mixed precision and the rows that are held wrap it; None where that is not known."""
        return self.graphs.optimizer

    @property
    def metadata(self) -> dict[str, str]:
        """The ``metadata_props`` of the source model, which an exported model keeps; nothing is lowered for it."""
        return dict(self.graphs.unlowered("predict").metadata_props)

    def planned_peak(self, batch: int = 1, graph: str = "step", extents: Mapping[str, int] | None = None) -> PlannedPeak:
        """Return how many bytes a graph is planned to need when its nodes run in their order; nothing is run.

        In a step the next values of a large state are written over the present ones, as on ONNX Runtime; of a small one both
        count.

        Args:
            batch: what the dimension of the samples stands for where it is symbolic.
            graph: ``step``, or another of the graphs.
            extents: what other symbolic dimensions stand for, by name; 1 where one is not given.

        Returns:
            The peak, and what it would be if nothing were computed a second time (``compile(..., recompute=...)``).

        Raises:
            ConfigurationError: no such graph, or a batch that is no whole number of at least one.
        """
        from burnish.analysis.memory_plan import planned_peak
        from burnish.program.signature import outputs_in_place

        if graph not in self.graphs:
            raise ConfigurationError(f"graph: unknown '{graph}'; choose among {', '.join(map(repr, self.graphs))}")
        if not is_whole(batch) or batch < 1:
            raise ConfigurationError(f"batch={batch!r}: give a whole number of at least one")
        in_place = outputs_in_place(self.apply, self.signature["apply"]) if graph == "step" else ()
        return planned_peak(self.graphs[graph], batch, extents, in_place)

    def initial_state(self, seed: int = 0, reinitialize: str | None = None) -> dict[str, np.ndarray]:
        """Return the state that training starts from, by state name: the weights, and what the init graph computes.

        Args:
            seed: of the random key, and of ``reinitialize``.
            reinitialize: None keeps the weights of the source. A scheme trains from scratch: ``kaiming`` (He et al. 2015,
                normal, fan in; also ``kaiming_normal``, ``kaiming_uniform``) or ``xavier`` (Glorot and Bengio 2010, uniform;
                also ``xavier_uniform``, ``xavier_normal``). Biases become zero, scales one, running means zero and running
                variances one; rows that the program holds stay.

        Raises:
            ConfigurationError: a seed that is no integer of 64 bits, an unknown scheme, or a parameter whose use does not tell
                how to draw it.
        """
        return dict(self.initial_entries(seed, reinitialize))

    def initial_entries(self, seed: int = 0, reinitialize: str | None = None) -> LazyArrays:
        """Return ``initial_state`` as a mapping that makes each array when it is asked for, once.

        ``Session(program, tables=..., state=program.initial_entries(...))`` writes tables that do not fit into memory.

        Args:
            seed, reinitialize: as ``initial_state`` takes them.

        Raises:
            ConfigurationError: as ``initial_state``.
        """
        from burnish.program.initialization import initial_state

        held_rows = self.options.get("hold_rows", {})
        return initial_state(self.graphs, self.signature, self.weights, held_rows, seed, reinitialize)

    def release_weights(self) -> None:
        """Let the memory of ``weights`` go, where they can be read again from the ONNX file that the program was compiled from.

        A session does so when it has taken them over. What needs them again, such as ``initial_state``, reads them there: the
        file may have been moved or replaced, and is refused where it was written to in place.
        """
        if isinstance(self.weights, Weights):
            self.weights.release()

    def with_optimizer(self, optimizer: str | Mapping[str, Any] | Optimizer) -> Program:
        """Return a program that trains in the same way with another optimizer, or with other parameters frozen.

        ``grad``, ``evaluate`` and ``predict`` are those of this program, and nothing is differentiated: ``init``, ``apply`` and
        ``step`` are made anew from the gradients. Gradients that only frozen parameters need are left out of ``step``. Whatever
        has a gradient here can train: to freeze and to unfreeze, give groups without and with ``"frozen"``.

        Args:
            optimizer: a name, an object of ``burnish.optim``, or the options of one.

        Raises:
            ConfigurationError: there is no such optimizer, a pattern matches no parameter, or nothing would train.

        Warns:
            ObjectiveWarning: it freezes all parameters of a batch normalization that was compiled, by ``norm="auto"``, to train:
                the layer goes on normalizing by the batch and moving its statistics.
        """
        return replace(self, graphs=self.graphs.with_optimizer(optimizer))

    def carry_state(self, state: Mapping[str, np.ndarray], seed: int = 0) -> CarriedState:
        """Take over what fits of the state of another program of the same model: after ``with_optimizer``, for example.

        Parameters, statistics, the random key, the step and the optimizer's slots are taken over where name, dtype and shape
        agree; everything else starts anew, and is named with the reason. See ``burnish.program.carry_over`` for the step.

        Args:
            state: arrays by state name, as ``Session.state`` returns them; left as it is.
            seed: of the random key, where the state has none.
        """
        from burnish.program.carry_over import carry_over

        return carry_over(self.init, self.signature, self.options, self.initial_state(seed), state)

    @garbage_kept()
    def save(self, path: str | Path) -> Path:
        """Write the program into a folder of its own: one ``.onnx`` per graph, ``program.json``, ``state.safetensors``.

        A path that ends in ``.onnx`` is written as one file instead, see ``to_onnx``. Folder and file appear whole or not at all.
        A program saved there before is replaced.

        Returns:
            The folder or file.

        Raises:
            CheckpointError: the folder holds something else, or cannot be written, or one file cannot hold the program.
        """
        from burnish.files.saving import save

        return save(self, Path(path))

    def measured_peak(self, batch: int = 1) -> int | None:
        """Return the bytes that steps take on ONNX Runtime, measured in a process of its own; None where the system is not Linux.

        Counted is what that process has at its peak beyond ONNX Runtime and the loaded graph: the state, twice where it is small,
        the batch, activations, gradients, and what kernels need. The batch is of drawn data; other symbolic dimensions are 1.

        Args:
            batch: samples of a step.

        Raises:
            EngineError: a step cannot be run.
        """
        from burnish.engines.onnxruntime.measured_step import measure

        return measure(self, batch)

    def package(
        self,
        path: str | Path,
        *,
        graph: str | None = None,
        extents: Mapping[str, int] | None = None,
        device: str | None = None,
        runtime: str | None = None,
    ) -> Path:
        """Write what trains without Python: a graph compiled ahead of time into one file, or a folder with a client in C.

        ``docs/torch-engine.md`` describes the file. It takes the graph's inputs in the order of the signature, contiguous, and
        returns its outputs in that order; which they are stands in the file too. The state is no part of it: ``initial_state`` or
        a checkpoint has it. ``docs/c-client.md`` describes the folder.

        Args:
            path: ending in ``.pt2``: AOTInductor's, for libtorch, built for this machine's processor. Needs ``torch`` and a C++
                compiler. A file there is replaced. With ``runtime``, a new folder.
            graph: ``step``, which is the default, or another of the six graphs.
            extents: what symbolic dimensions stand for, by name; faster code for this extent alone. Others stay open, for extents
                of two and more.
            device: as PyTorch names it; by default ``cpu``.
            runtime: ``c`` writes the program, its graphs in ONNX Runtime's own format, the operators that they need, and the
                source of a client that trains; ``graph``, ``extents`` and ``device`` are left out.

        Returns:
            The path.

        Raises:
            ConfigurationError: no such kind of package, runtime, graph or dimension.
            EngineError: PyTorch, a compiler or the device is not there, or the graph cannot be compiled or loaded.
            CheckpointError: the file cannot be written, or the folder is not a new one.
        """
        from burnish.engines.packaging import write_package

        return write_package(self, Path(path), graph, extents or {}, device, runtime)

    @garbage_kept()
    def to_onnx(
        self, state: Mapping[str, np.ndarray] | None = None, metadata: Mapping[str, str] | None = None
    ) -> onnx.ModelProto:
        """Return the program as one ONNX model: the inference graph and a ``TrainingInfoProto``.

        A plain runtime runs it for inference, with the weights and running statistics of ``state``. ``Program.load`` makes the
        same program of it again, whose ``saved_state`` is ``state``.

        Args:
            state: as ``Session.state`` returns it; None is ``initial_state()``.
            metadata: further entries for ``metadata_props``.

        Raises:
            CheckpointError: the state does not fit the program, or both are too large for one model.
            UnsupportedOperatorError: the graphs hold operators that cannot stand in one standard model.
        """
        from burnish.files.training_info import to_training_model

        return to_training_model(self, state, metadata)

    @staticmethod
    @garbage_kept()
    def load(source: str | Path | onnx.ModelProto) -> Program:
        """Read a program that ``save`` wrote, checking every file against what was recorded, or a model with ``training_info``.

        A ``training_info`` that another tool wrote is a program where it is one step that updates initializers from the
        ``Gradient`` of a scalar loss. ``saved_state`` then holds the initializers as they are; ``weights`` and ``initial_state``
        are what its initialization graph makes of them, random numbers drawn from seed 0.

        Args:
            source: the folder; or an ONNX file with ``training_info``, or such a model.

        Raises:
            CheckpointError: a file is missing, truncated, changed or of a newer version, or the folder is not a program; or the
                model holds no training, or not what a program needs.
            ModelError: the file is no valid ONNX model.
        """
        from burnish.files.saving import load

        return load(source)


@dataclass(frozen=True)
class Inference:
    """A model in inference mode, its weights in it.

    Attributes:
        predict: (data) -> the outputs of the model, under their own names.
        evaluate: (data, label) -> loss, metrics and their totals, as the graph of a program; None where no loss was given.
        signature: of both graphs, by name.
        options: ``loss`` and ``metrics``, and ``loss_terms`` where the loss is a weighted sum, as a program has them.
        metadata: the ``metadata_props`` of the model.
    """

    predict: ir.Model
    evaluate: ir.Model | None
    signature: Mapping[str, GraphSignature]
    options: Mapping[str, Any]
    metadata: Mapping[str, str]
