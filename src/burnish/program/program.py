"""The program: six graphs, their signature and the initial state."""

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
        graphs: the six graphs by name, and ``features`` if there is one, each lowered when it is first read.
        weights: the source's parameters and statistics, by state name (``param/...``, ``stat/...``); see ``release_weights``.
        source: the original model that the program was made from, without the weights that are in the state; None for a program
            that was not made from a model, or was read from one ONNX file.
        saved_state: the state in a program that was read from one ONNX file, to continue training from: ``Session(program,
            state=program.saved_state)``; else None.
    """

    graphs: LoweredGraphs
    weights: Mapping[str, np.ndarray]
    source: SourceModel | None = field(default=None, compare=False)
    saved_state: Mapping[str, np.ndarray] | None = field(default=None, init=False)

    def __repr__(self) -> str:
        """Show the number of nodes of each graph; nothing is lowered."""
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
        """(seed, param/*) -> opt/*, rng/key, step: the part of the initial state that the model does not have."""
        return self.graphs["init"]

    @property
    def step(self) -> ir.Model:
        """One training step: ``grad``, then ``apply``; also returns the learning rate if the graph computes it."""
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

        The figures of a data set are computed exactly from these totals.
        """
        return self.graphs["evaluate"]

    @property
    def predict(self) -> ir.Model:
        """(data, param/*, stat/*) -> the outputs of the model, under their own names."""
        return self.graphs["predict"]

    @property
    def features(self) -> ir.Model | None:
        """(data) -> the features of the frozen part of the model, which ``step``, ``grad`` and ``evaluate`` then take as data.

        None for a program that was compiled without ``cached_features``.
        """
        return self.graphs.get(FEATURES)

    @property
    def signature(self) -> Signature:
        """Every input and output of every graph."""
        return self.graphs.signature

    @property
    def options(self) -> dict[str, Any]:
        """The options that the program was compiled with, as JSON-compatible values: loss, optimizer, norm, metrics."""
        return self.graphs.options

    @property
    def semantic(self) -> Mapping[str, ir.Model]:
        """``grad``, ``evaluate`` and ``predict`` before lowering and without recomputation.

        They are for engines with their own kernels; empty if they were not kept.
        """
        return self.graphs.semantic

    @property
    def target(self) -> Target:
        """The runtime that the graphs are lowered for."""
        return self.graphs.target

    @property
    def optimizer(self) -> Optimizer | None:
        """The optimizer with the wrappers of mixed precision and held rows; None if it is unknown."""
        return self.graphs.optimizer

    @property
    def metadata(self) -> dict[str, str]:
        """The ``metadata_props`` of the source model, which an exported model keeps; nothing is lowered."""
        return dict(self.graphs.unlowered("predict").metadata_props)

    def planned_peak(self, batch: int = 1, graph: str = "step", extents: Mapping[str, int] | None = None) -> PlannedPeak:
        """Return the planned memory of a graph in bytes, if its nodes run in order; nothing is run.

        In a step, the next values of a large state overwrite the present ones, as on ONNX Runtime; a small state counts twice.

        Args:
            batch: number of samples, if that dimension is symbolic.
            graph: ``step``, or another of the graphs.
            extents: values of other symbolic dimensions, by name; 1 by default.

        Returns:
            The peak, and the peak without recomputation (``compile(..., recompute=...)``).

        Raises:
            ConfigurationError: the graph does not exist, or the batch is not a positive integer.
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
        """Return the initial state of training, by state name: the weights, and the results of the init graph.

        Args:
            seed: seed of the random key, and of ``reinitialize``.
            reinitialize: None keeps the weights of the source. A scheme trains from scratch: ``kaiming`` (He et al. 2015, normal,
                fan in; also ``kaiming_normal``, ``kaiming_uniform``) or ``xavier`` (Glorot and Bengio 2010, uniform; also
                ``xavier_uniform``, ``xavier_normal``). Biases become zero, scales one, running means zero and running variances
                one; rows that the program holds do not change.

        Raises:
            ConfigurationError: the seed is not a 64-bit integer, the scheme is unknown, or the uses of a parameter do not show
                how to initialize it.
        """
        return dict(self.initial_entries(seed, reinitialize))

    def initial_entries(self, seed: int = 0, reinitialize: str | None = None) -> LazyArrays:
        """Return ``initial_state`` as a mapping that makes each array when it is read; read each entry only once.

        ``Session(program, tables=..., state=program.initial_entries(...))`` writes tables that do not fit into memory.

        Args:
            seed, reinitialize: as for ``initial_state``.

        Raises:
            ConfigurationError: as for ``initial_state``.
        """
        from burnish.program.initialization import initial_state

        held_rows = self.options.get("hold_rows", {})
        return initial_state(self.graphs, self.signature, self.weights, held_rows, seed, reinitialize)

    def release_weights(self) -> None:
        """Free the memory of ``weights`` that can be read again from the ONNX file that the program was compiled from.

        A session does so after it has copied them. Later uses, such as ``initial_state``, read the file again: it may have been
        moved or replaced, but is refused if it was overwritten in place.
        """
        if isinstance(self.weights, Weights):
            self.weights.release()

    def with_optimizer(self, optimizer: str | Mapping[str, Any] | Optimizer) -> Program:
        """Return a program that trains in the same way with another optimizer, or with other parameters frozen.

        ``grad``, ``evaluate`` and ``predict`` stay the same, and nothing is differentiated; ``init``, ``apply`` and ``step`` are
        rebuilt from the gradients. ``step`` leaves out gradients that only frozen parameters need. Every parameter with a
        gradient can train: to freeze or unfreeze it, give groups with or without ``"frozen"``.

        Args:
            optimizer: a name, an object of ``burnish.optim``, or the options of one.

        Raises:
            ConfigurationError: the optimizer does not exist, a pattern matches no parameter, or nothing would train.

        Warns:
            ObjectiveWarning: it freezes all parameters of a batch normalization that ``norm="auto"`` compiled to train: the layer
                still normalizes by the batch and updates its statistics.
        """
        return replace(self, graphs=self.graphs.with_optimizer(optimizer))

    def carry_state(self, state: Mapping[str, np.ndarray], seed: int = 0) -> CarriedState:
        """Take over the fitting part of the state of another program of the same model, for example after ``with_optimizer``.

        Parameters, statistics, the random key, the step and the optimizer's slots are taken over if name, dtype and shape match;
        all other entries start from their initial values and are listed with the reason. See ``burnish.program.carry_over`` for
        the step.

        Args:
            state: arrays by state name, as ``Session.state`` returns them; not modified.
            seed: seed of the random key, if the state has none.
        """
        from burnish.program.carry_over import carry_over

        return carry_over(self.init, self.signature, self.options, self.initial_state(seed), state)

    @garbage_kept()
    def save(self, path: str | Path) -> Path:
        """Write the program into its own folder: one ``.onnx`` per graph, ``program.json``, ``state.safetensors``.

        If the path ends in ``.onnx``, one file is written instead; see ``to_onnx``. The folder or file is written completely or
        not at all, and replaces a program saved there before.

        Returns:
            The folder or file.

        Raises:
            CheckpointError: the folder holds something else, or cannot be written, or one file cannot hold the program.
        """
        from burnish.files.saving import save

        return save(self, Path(path))

    def measured_peak(self, batch: int = 1) -> int | None:
        """Return the memory of training steps on ONNX Runtime in bytes, measured in a separate process; None except on Linux.

        This is the peak of that process beyond ONNX Runtime and the loaded graph: the state (twice if it is small), the batch,
        activations, gradients, and the workspace of kernels. The batch is random; other symbolic dimensions are 1.

        Args:
            batch: number of samples in a step.

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
        """Write a package that trains without Python: one graph compiled ahead of time, or a folder with a client in C.

        ``docs/torch-engine.md`` describes the file. It takes the graph's inputs in the order of the signature, contiguous, and
        returns its outputs in that order; the file lists both. It does not contain the state, which comes from ``initial_state``
        or a checkpoint. ``docs/c-client.md`` describes the folder.

        Args:
            path: a file name ending in ``.pt2``: an AOTInductor package for libtorch, built for this machine's processor. Needs
                ``torch`` and a C++ compiler; replaces an existing file. With ``runtime``, a new folder.
            graph: ``step`` (the default), or another of the six graphs.
            extents: values of symbolic dimensions, by name, for faster code that takes only these. Others stay open, for extents
                of two and more.
            device: device name of PyTorch; by default ``cpu``.
            runtime: ``c`` writes the program, its graphs in ONNX Runtime's own format, the operators that they need, and the
                source of a client that trains; do not give ``graph``, ``extents`` and ``device``.

        Returns:
            The path.

        Raises:
            ConfigurationError: the kind of package, runtime, graph or dimension does not exist.
            EngineError: PyTorch, a compiler or the device is missing, or the graph cannot be compiled or loaded.
            CheckpointError: the file cannot be written, or the folder is not new.
        """
        from burnish.engines.packaging import write_package

        return write_package(self, Path(path), graph, extents or {}, device, runtime)

    @garbage_kept()
    def to_onnx(
        self, state: Mapping[str, np.ndarray] | None = None, metadata: Mapping[str, str] | None = None
    ) -> onnx.ModelProto:
        """Return the program as one ONNX model: the inference graph and a ``TrainingInfoProto``.

        Any runtime runs it for inference, with the weights and running statistics of ``state``. ``Program.load`` reads the same
        program back, with ``state`` as its ``saved_state``.

        Args:
            state: a state as ``Session.state`` returns it; by default ``initial_state()``.
            metadata: more entries for ``metadata_props``.

        Raises:
            CheckpointError: the state does not fit the program, or both are too large for one model.
            UnsupportedOperatorError: the graphs hold operators that one standard model cannot contain.
        """
        from burnish.files.training_info import to_training_model

        return to_training_model(self, state, metadata)

    @staticmethod
    @garbage_kept()
    def load(source: str | Path | onnx.ModelProto) -> Program:
        """Read a program that ``save`` wrote, checking every file against the recorded hashes, or a model with ``training_info``.

        A ``training_info`` of another tool is a program if it is one step that updates initializers from the ``Gradient`` of a
        scalar loss. ``saved_state`` then holds the initializers of the file; ``weights`` and ``initial_state`` are the results of
        its initialization graph, with random numbers drawn from seed 0.

        Args:
            source: the folder; or an ONNX file with ``training_info``, or such a model.

        Raises:
            CheckpointError: a file is missing, truncated, changed or of a newer version, or the folder is not a program; or the
                model has no training graphs, or lacks something that a program needs.
            ModelError: the file is not a valid ONNX model.
        """
        from burnish.files.saving import load

        return load(source)


@dataclass(frozen=True)
class Inference:
    """A model in inference mode that contains its weights.

    Attributes:
        predict: (data) -> the outputs of the model, under their own names.
        evaluate: (data, label) -> loss, metrics and their totals, as in a program; None if no loss was given.
        signature: signatures of both graphs, by name.
        options: ``loss`` and ``metrics``, and ``loss_terms`` if the loss is a weighted sum, as in a program.
        metadata: the ``metadata_props`` of the model.
    """

    predict: ir.Model
    evaluate: ir.Model | None
    signature: Mapping[str, GraphSignature]
    options: Mapping[str, Any]
    metadata: Mapping[str, str]
