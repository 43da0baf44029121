"""What a session of several workers is asked for, and how it opens a program."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from burnish.compiler.executable import lower
from burnish.distributed.agreement import check_agreement
from burnish.distributed.connection.arrays import mpi
from burnish.distributed.connection.communicators import GroupCommunicator, OrderedSums
from burnish.distributed.connection.encodings import COMPRESSIONS, Encoding
from burnish.distributed.connection.environment import is_of_mpi
from burnish.distributed.connection.joining import is_torch_group, join
from burnish.distributed.connection.process_group import ProcessGroup
from burnish.distributed.graphs.accumulation import accumulated_entries, accumulates
from burnish.distributed.graphs.derivation import derive
from burnish.distributed.graphs.sharding import sharded, shares_of
from burnish.distributed.graphs.synchronization import STATISTICS
from burnish.distributed.graphs.table_shards import TableShards, holding_rows
from burnish.distributed.runners.accumulating import AccumulatingRunner, part_of
from burnish.distributed.runners.local_steps import LocalSteps, check_local_steps, outer_of, worker_start
from burnish.distributed.runners.parts import PartRunner
from burnish.distributed.runners.sharded import ShardedRunner
from burnish.distributed.runners.spread_tables import SpreadTablesRunner, held_by
from burnish.engines import Engine, ProgramRunner
from burnish.engines.base import cannot_exchange
from burnish.engines.communicator import Communicator
from burnish.errors import ConfigurationError
from burnish.norms import Local, NormPolicy, Sync, get
from burnish.optim import slots_by_options
from burnish.optim.row_updates import looks_across_rows
from burnish.program import Program, Role
from burnish.settings import PlainSettings, is_whole

BUCKET_SIZE = 25 * 2**20
AGREED = ("compression", "deterministic", "shard_optimizer", "shard_tables", "statistics", "synchronize_every")
"""Options of which the training graph says nothing, and in which workers are not to differ."""


@dataclass(frozen=True, kw_only=True)
class DataParallel(PlainSettings):
    """Data-parallel training: every worker has a part of each batch, and all have the same weights after each step.

    Args:
        norm: policy of the batch normalization layers compiled as ``train``: ``sync`` (statistics of the whole batch),
            ``sync:<n>`` (of groups of n workers) or ``local`` (of each worker's own part). Layers with another policy keep it.
            None is ``sync``, or ``local`` with ``synchronize_every``.
        statistics: how workers with different running statistics agree on them: ``mean``, the average over all workers, or
            ``rank0``, those of the first worker, as in ``DistributedDataParallel``.
        bucket_size: bytes of gradients that are exchanged at once. The exchange begins as soon as they are computed.
        share: let batch normalization layers that do not depend on each other share one exchange.
        compression: how gradients travel: None as they are, or in 16 bits, ``float16`` or ``bfloat16``, which are summed in more.
        deterministic: take every sum over the workers in the order of their ranks.
        shard_optimizer: let each worker keep the optimizer state of a share of the parameters, and update only those. ``state``,
            ``save_checkpoint`` and ``export`` of the session are then exchanges that all workers make.
        shard_tables: let each worker keep only some rows of embedding tables and of their slots: ``auto`` for every table that
            the program updates by rows (``compile(sparse=...)``), or names or patterns. ``evaluate``, ``predict``, ``state``,
            ``save_checkpoint`` and ``export`` of the session are then exchanges that all workers make.
        synchronize_every: let workers step alone for so many steps and then average their states (local SGD; with
            ``burnish.optim.diloco``, DiLoCo). ``state``, ``save_checkpoint`` and ``export`` end such a round on all workers.
            None: all workers have the same weights after each step.
        group: the workers: what ``burnish.distributed.join()`` returned, or a process group of ``torch.distributed``. None: the
            workers of this run (by ``torch.distributed`` if it is initialized, else by the environment), which the session joins
            when it opens.
        communicator: another way to reach the workers, instead of ``group``.

    Raises:
        ConfigurationError: an option has another value.
    """

    norm: str | NormPolicy | None = None
    statistics: str = "mean"
    bucket_size: int = BUCKET_SIZE
    share: bool = True
    compression: str | None = None
    deterministic: bool = False
    shard_optimizer: bool = False
    shard_tables: str | Sequence[str] | None = None
    synchronize_every: int | None = None
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
        self._check_tables()
        self._check_local_steps()
        if self.group is not None and not isinstance(self.group, ProcessGroup) and not is_torch_group(self.group):
            raise ConfigurationError(
                f"DataParallel: group={self.group!r} is no group of workers that this process is of: give what "
                "burnish.distributed.join() returns, or a process group of torch.distributed"
            )

    def _check_tables(self) -> None:
        tables = self.shard_tables
        if tables is None or isinstance(tables, str):
            return
        if not isinstance(tables, Sequence) or not tables or not all(isinstance(name, str) for name in tables):
            raise ConfigurationError(
                f"DataParallel: shard_tables={tables!r}: give 'auto', or names or patterns of embedding tables, such as "
                "['*embedding*']"
            )

    def _check_local_steps(self) -> None:
        every = self.synchronize_every
        if every is None:
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
        """What batch normalization layers of the policy ``train`` do."""
        return get(self.norm or ("sync" if self.synchronize_every is None else "local"))

    @staticmethod
    def check(parallel: object) -> None:
        """Raise ConfigurationError where ``parallel`` is neither such options nor None."""
        if parallel is not None and not isinstance(parallel, DataParallel):
            raise ConfigurationError(f"parallel={parallel!r}: give burnish.DataParallel(), or None to train alone")

    def joined(self, device: str | None) -> DataParallel:
        """Return these options with the workers of the run in ``group``; joins them where it is not given.

        Raises:
            ConfigurationError: the environment contradicts itself, or ``communicator`` is given in place of a group.
            EngineError: PyTorch is missing, or lacks what the device needs.
            WorkerError: others have not come.
        """
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
        """Open the program on an engine, as every worker runs it; all workers call this together.

        Args:
            program: what to open.
            engine: one that runs exchanges.
            state, device, threads: as ``Engine.open`` takes them.

        Raises:
            ConfigurationError: the workers of the run cannot be found, the program cannot be trained by several workers, or
                workers differ in program, options, version or state.
            EngineError: the engine cannot exchange values with other workers.
        """
        if self.synchronize_every is not None:
            return self._open_alone(program, engine, state, device=device, threads=threads)
        if outer_of(program) is not None:
            raise ConfigurationError(
                "DataParallel: the optimizer is diloco, whose outer step is taken where workers meet: give "
                "DataParallel(synchronize_every=...), such as 100, or compile with the optimizer inside alone"
            )
        check_engine(engine)
        uncompressed, communicator = self._communicators(device)
        executable = lower(program, engine.target.among_workers())
        several = communicator.size > 1
        tables = None if self.shard_tables is None else TableShards.of(program.signature, self.shard_tables, communicator.size)
        tables = tables if several else None
        if tables is not None:
            _check_rows_apart(program, tables)
        derived = derive(
            executable,
            communicator.size,
            self.policy,
            bucket_size=self.bucket_size,
            share=self.share,
            statistics=self.statistics,
            shards=tables,
        )
        check_agreement(communicator, derived, state, self._agreed)
        if tables is not None:
            derived = holding_rows(derived, tables, communicator.rank)
            state = held_by(state, tables, communicator.rank)
        accumulated = accumulated_entries(executable) if several and accumulates(executable) else ()
        slots = slots_by_options(program.options["optimizer"])
        shares = shares_of(derived.signature, communicator.size, slots, accumulated) if self.shard_optimizer and several else None
        runner: ProgramRunner = engine.open(
            derived if shares is None else sharded(derived, shares, communicator.rank),
            part_of(state if shares is None else dict(state), accumulated, communicator.rank),
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
        """How workers are reached: without PyTorch, those that MPI has started by MPI."""
        if self.communicator is not None:
            return self.communicator
        if self.group is None and is_of_mpi() and importlib.util.find_spec("torch") is None:
            return mpi()
        return GroupCommunicator(self._workers(device))

    def _communicators(self, device: str | None) -> tuple[Communicator, Communicator]:
        """How workers are reached: with what they give as it is, and as gradients travel."""
        uncompressed = communicator = self._communicator(device)
        if getattr(communicator, "takes_arrays", False) and (self.deterministic or self.compression is not None):
            raise ConfigurationError(
                "DataParallel: deterministic and compression are made of a process group of PyTorch: leave them out with "
                "communicator=burnish.distributed.mpi() and the like, or give group= in its place"
            )
        encoding = self._compressed()
        if self.deterministic or encoding is not None:
            communicator = OrderedSums(communicator, deterministic=self.deterministic, compression=encoding)
        return uncompressed, communicator

    def _open_alone(
        self, program: Program, engine: Engine, state: Mapping[str, np.ndarray], *, device: str | None, threads: int | None
    ) -> ProgramRunner:
        """Open the program as a worker runs it that steps alone, on any engine."""
        check_local_steps(program)
        communicator = self._communicator(device)
        if self.deterministic:
            communicator = OrderedSums(communicator)
        executable = lower(program, engine.target)
        check_agreement(communicator, executable, state, self._agreed)
        key = next((entry.name for entry in program.signature["step"].inputs_of(Role.KEY)), None)
        runner = engine.open(executable, worker_start(state, key, communicator.rank), device=device, threads=threads)
        assert self.synchronize_every is not None
        return LocalSteps(runner, communicator, program, self.synchronize_every, state, self.statistics)

    @property
    def _agreed(self) -> str:
        return str({name: getattr(self, name) for name in AGREED})


def _check_rows_apart(program: Program, tables: TableShards) -> None:
    """Raise ConfigurationError where a worker that holds some rows of a table would need others to update them."""
    for name in tables.extents:
        if looks_across_rows(program.optimizer, name):
            raise ConfigurationError(
                f"shard_tables: the optimizer looks, to update a row of '{name}', at the other rows that the batch reads, of "
                "which other workers hold some: leave shard_tables out, or compile with an optimizer such as 'rowwise_adagrad'"
            )


def check_engine(engine: Engine) -> None:
    """Raise EngineError where an engine cannot exchange values with other workers."""
    if not engine.target.collectives:
        raise cannot_exchange(engine.name)
