"""``DataParallel``: the options of a session with several workers, and how it opens a program."""

from __future__ import annotations

import hashlib
import importlib.util
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import onnx_ir as ir

from burnish.compiler.lowered_graphs import LoweredGraphs
from burnish.distributed.accumulation import AccumulatingRunner, accumulated_entries, accumulates, part_of
from burnish.distributed.batch_normalization import STATISTICS
from burnish.distributed.connection.communicators import COMPRESSIONS, Encoding, GroupCommunicator, OrderedSums, mpi
from burnish.distributed.connection.environment import is_of_mpi
from burnish.distributed.connection.joining import is_torch_group, join
from burnish.distributed.connection.process_group import ProcessGroup
from burnish.distributed.derivation import derive
from burnish.distributed.exchange_options import ExchangeOptions
from burnish.distributed.local_steps import LocalSteps, check_local_steps, outer_of, worker_start
from burnish.distributed.runner import gathered
from burnish.distributed.samples import PartRunner
from burnish.distributed.sharded_optimizer import ShardedRunner, sharded, shares_of
from burnish.distributed.sharded_tables import SpreadTablesRunner, TableShards, held_by, holding_rows
from burnish.engines import Engine, ProgramRunner
from burnish.engines.base import cannot_exchange
from burnish.engines.communicator import Communicator
from burnish.errors import ConfigurationError
from burnish.norms import Local, NormPolicy, Sync, get
from burnish.optim import slots_by_options
from burnish.optim.row_updates import looks_across_rows
from burnish.program import Program, Role
from burnish.settings import PlainSettings
from burnish.validation import is_whole
from burnish.version import __version__

AGREED = ("compression", "deterministic", "shard_optimizer", "shard_tables", "statistics", "synchronize_every")
"""Options that do not affect the training graph, but must be the same on all workers."""


@dataclass(frozen=True, kw_only=True)
class DataParallel(ExchangeOptions, PlainSettings):
    """Data-parallel training: every worker has a part of each batch, and all have the same weights after each step.

    Args:
        norm: policy of the batch normalization layers compiled as ``train``: ``sync`` (statistics of the whole batch),
            ``sync:<n>`` (of groups of n workers) or ``local`` (of each worker's own part). Layers with another policy keep it.
            None is ``sync``, or ``local`` with ``synchronize_every``.
        statistics: running statistics if the workers' differ: ``mean``, the average over all workers, or ``rank0``, the first
            worker's, as in ``DistributedDataParallel``.
        bucket_size: bytes of gradients per exchange; an exchange begins as soon as its gradients are computed.
        share: True to let independent batch normalization layers share an exchange.
        compression: format of sent gradients: None for their own, or 16 bits, ``float16`` or ``bfloat16``; sums have more bits.
        deterministic: True to sum over the workers in rank order.
        shard_optimizer: True to let each worker keep the optimizer state of a share of the parameters, and update only those.
            ``state``, ``save_checkpoint`` and ``export`` of the session then become exchanges that all workers must call.
        shard_tables: embedding tables to divide, with their slots, by rows among the workers: ``auto`` for every table that the
            program updates by rows (``compile(sparse=...)``), or names or patterns. ``evaluate``, ``predict``, ``state``,
            ``save_checkpoint`` and ``export`` of the session then become exchanges that all workers must call.
        synchronize_every: number of steps that workers take separately before they average their states (local SGD; with
            ``burnish.optim.diloco``, DiLoCo). ``state``, ``save_checkpoint`` and ``export`` end such a round on all workers.
            None: all workers have the same weights after each step.
        group: the workers: the result of ``burnish.distributed.join()``, or a process group of ``torch.distributed``. None: the
            workers of this run (from ``torch.distributed`` if it is initialized, otherwise from the environment), joined when the
            session opens.
        communicator: another way to reach the workers, instead of ``group``.

    Raises:
        ConfigurationError: an option has an invalid value.
    """

    norm: str | NormPolicy | None = None
    group: Any = field(default=None, repr=False, compare=False)
    communicator: Communicator | None = field(default=None, repr=False, compare=False)

    def __post_init__(self) -> None:
        if not isinstance(self.policy, Sync | Local):
            raise ConfigurationError(
                f"DataParallel: norm={str(self.norm)!r} is no policy for several workers: give 'sync', 'sync:<workers>' or "
                "'local', and any other policy to burnish.compile(norm=...)"
            )
        if not is_whole(self.bucket_size) or self.bucket_size < 1:
            raise ConfigurationError(f"DataParallel: bucket_size={self.bucket_size!r}: give a whole number of bytes, 1 or more")
        if self.statistics not in STATISTICS:
            raise ConfigurationError(
                f"DataParallel: statistics={self.statistics!r}: give 'mean', the average of the running statistics over the "
                "workers, or 'rank0', those of the first worker"
            )
        self._compressed()
        tables = self.shard_tables
        if not (tables is None or isinstance(tables, str)) and (
            not isinstance(tables, Sequence) or not tables or not all(isinstance(name, str) for name in tables)
        ):
            raise ConfigurationError(
                f"DataParallel: shard_tables={tables!r}: give 'auto', or names or patterns of embedding tables, such as "
                "['*embedding*']"
            )
        if self.group is not None and not isinstance(self.group, ProcessGroup) and not is_torch_group(self.group):
            raise ConfigurationError(
                f"DataParallel: group={self.group!r} is no group of workers that this process is of: give what "
                "burnish.distributed.join() returns, or a process group of torch.distributed"
            )
        if (every := self.synchronize_every) is None:
            return
        if not is_whole(every) or every < 1:
            raise ConfigurationError(f"DataParallel: synchronize_every={every!r}: give a whole number of steps, 1 or more")
        refused = {
            f"norm={str(self.norm)!r}": (isinstance(self.policy, Sync), "statistics of several workers in each step"),
            "shard_optimizer=True": (self.shard_optimizer, "each worker updates all parameters"),
            f"shard_tables={self.shard_tables!r}": (self.shard_tables is not None, "each worker updates all rows"),
            f"compression={self.compression!r}": (self.compression is not None, "no gradients are exchanged"),
        }
        for option, (is_given, reason) in refused.items():
            if is_given:
                raise ConfigurationError(
                    f"DataParallel: {option} does not go with synchronize_every, where workers step alone ({reason}): leave one "
                    "of them out"
                )

    def _compressed(self) -> Encoding | None:
        return None if self.compression is None else COMPRESSIONS.resolve(self.compression)

    @property
    def policy(self) -> NormPolicy:
        return get(self.norm or ("sync" if self.synchronize_every is None else "local"))

    @staticmethod
    def check(parallel: object) -> None:
        """Raise ConfigurationError unless ``parallel`` is such options or None."""
        if parallel is not None and not isinstance(parallel, DataParallel):
            raise ConfigurationError(f"parallel={parallel!r}: give burnish.DataParallel(), or None to train alone")

    def joined(self, device: str | None) -> DataParallel:
        if self.communicator is not None:
            raise ConfigurationError(
                "DataParallel: communicator=... connects the steps of a session alone: leave it out for a trainer, or "
                "give it group=..."
            )
        return replace(self, group=self._workers(device))

    def _workers(self, device: str | None) -> ProcessGroup:
        return self.group if isinstance(self.group, ProcessGroup) else join(device or "cpu", group=self.group)

    def open(
        self, program: Program, engine: Engine, state: Mapping[str, np.ndarray], *, device: str | None, threads: int | None
    ) -> ProgramRunner:
        """Open the program on an engine as this worker's part of the run; all workers call this together.

        The arguments are those of ``Engine.open``.

        Raises:
            ConfigurationError: workers cannot train the program, or theirs differ.
            EngineError: the engine cannot exchange values.
        """
        if self.synchronize_every is not None:
            check_local_steps(program)
            alone = self._communicator(device)
            alone = OrderedSums(alone) if self.deterministic else alone
            graphs = program.graphs.lowered_to(engine.target)
            check_agreement(alone, graphs, state, self)
            key = next((entry.name for entry in program.signature["step"].inputs_of(Role.KEY)), None)
            runner = engine.open(graphs, worker_start(state, key, alone.rank), device=device, threads=threads)
            return LocalSteps(runner, alone, program, self.synchronize_every, state, self.statistics)
        if outer_of(program) is not None:
            raise ConfigurationError(
                "DataParallel: the optimizer is diloco, whose outer step is taken where workers meet: give "
                "DataParallel(synchronize_every=...), such as 100, or compile with the optimizer inside alone"
            )
        check_engine(engine)
        uncompressed = self._communicator(device)
        communicator = self._ordered(uncompressed)
        rank, workers = communicator.rank, communicator.size
        graphs = program.graphs.lowered_to(engine.target.among_workers())
        several = workers > 1
        tables = None if self.shard_tables is None else TableShards.of(program.signature, self.shard_tables, workers)
        tables = tables if several else None
        for name in () if tables is None else tables.extents:
            if looks_across_rows(program.optimizer, name):
                raise ConfigurationError(
                    f"shard_tables: the optimizer looks, to update a row of '{name}', at the other rows that the batch reads, of "
                    "which other workers hold some: leave shard_tables out, or compile with an optimizer such as "
                    "'rowwise_adagrad'"
                )
        derived = derive(
            graphs,
            workers,
            self.policy,
            bucket_size=self.bucket_size,
            share=self.share,
            statistics=self.statistics,
            shards=tables,
        )
        check_agreement(communicator, derived, state, self)
        if tables is not None:
            derived = holding_rows(derived, tables, rank)
            state = held_by(state, tables, rank)
        accumulated = accumulated_entries(graphs) if several and accumulates(graphs) else ()
        slots = slots_by_options(program.options["optimizer"])
        shares = shares_of(derived.signature, workers, slots, accumulated) if self.shard_optimizer and several else None
        runner = engine.open(
            derived if shares is None else sharded(derived, shares, rank),
            part_of(state if shares is None else dict(state), accumulated, rank),
            device=device,
            threads=threads,
            communicator=communicator,
        )
        if derived.signature["step"].inputs_of(Role.SAMPLES):
            runner = PartRunner(runner, uncompressed, derived.signature["step"])
        if shares is not None:
            runner = ShardedRunner(runner, communicator, shares, derived.signature.state, state)
        if tables is not None:
            runner = SpreadTablesRunner(runner, uncompressed, tables, program.signature)
        return AccumulatingRunner(runner, communicator, accumulated, state) if accumulated else runner

    def _communicator(self, device: str | None) -> Communicator:
        if self.communicator is not None:
            return self.communicator
        if self.group is None and is_of_mpi() and importlib.util.find_spec("torch") is None:
            return mpi()
        return GroupCommunicator(self._workers(device))

    def _ordered(self, communicator: Communicator) -> Communicator:
        if not self.deterministic and self.compression is None:
            return communicator
        if getattr(communicator, "takes_arrays", False):
            raise ConfigurationError(
                "DataParallel: deterministic and compression are made of a process group of PyTorch: leave them out with "
                "communicator=burnish.distributed.mpi() and the like, or give group= in its place"
            )
        return OrderedSums(communicator, deterministic=self.deterministic, compression=self._compressed())


def check_engine(engine: Engine) -> None:
    if not engine.target.collectives:
        raise cannot_exchange(engine.name)


REMEDIES = {
    "version of burnish": "install the same version everywhere",
    "program": "compile the same model with the same options, or load the same saved program, on every worker",
    "exchanges": "give every worker the same burnish.DataParallel options, and start as many workers as it counts",
    "state": "give every worker the same state or seed, and the same checkpoint",
}


def check_agreement(
    communicator: Communicator, graphs: LoweredGraphs, state: Mapping[str, np.ndarray], parallel: DataParallel
) -> None:
    grad, options = graphs.unlowered("grad").graph, {name: getattr(parallel, name) for name in AGREED}
    signature = json.dumps([graphs.signature.to_dict(), graphs.options], sort_keys=True, default=str)
    contents = (
        [__version__.encode()],
        [signature.encode()],
        [f"{communicator.size};{options}".encode(), *_structure(grad)],
        [part for name, array in sorted(state.items()) for part in (name.encode(), np.ascontiguousarray(array).tobytes())],
    )
    digests = [hashlib.sha256() for _ in contents]
    for digest, parts in zip(digests, contents, strict=True):
        for part in parts:
            digest.update(part)
    own = np.frombuffer(b"".join(digest.digest() for digest in digests), np.uint8).copy()
    rows = gathered(communicator, own).reshape(communicator.size, len(contents), -1)
    for index, (what, remedy) in enumerate(REMEDIES.items()):
        found = [bytes(row[index]).hex() for row in rows]
        other = next((rank for rank, digest in enumerate(found) if digest != found[0]), None)
        if other is not None:
            raise ConfigurationError(
                f"The workers do not train the same thing: the {what} of rank 0 has the hash {found[0][:16]} and that of rank "
                f"{other} {found[other][:16]}. {remedy[0].upper()}{remedy[1:]}"
            )


def _structure(graph: ir.Graph) -> Iterator[bytes]:
    numbers: dict[ir.Value, int] = {value: index for index, value in enumerate(graph.inputs)}
    for node in graph.all_nodes():
        operands = [None if value is None else numbers.get(value, -1) for value in node.inputs]
        yield f"{node.domain}:{node.op_type}{operands}".encode()
        for name, attribute in sorted(node.attributes.items()):
            if attribute.type == ir.AttributeType.TENSOR:
                yield name.encode() + attribute.as_tensor().tobytes()
            elif attribute.type not in (ir.AttributeType.GRAPH, ir.AttributeType.GRAPHS):
                yield f"{name}={attribute.value}".encode()
        for value in node.outputs:
            numbers[value] = len(numbers)
            yield f"{value.dtype}{value.shape}".encode()
