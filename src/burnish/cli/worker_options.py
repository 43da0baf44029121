"""Options of ``burnish train`` for several workers, and how this process joins the others."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

import typer

from burnish.cli import launch
from burnish.cli.option_groups import OptionGroup
from burnish.errors import ConfigurationError

if TYPE_CHECKING:
    from burnish.distributed import DataParallel
    from burnish.distributed.connection.process_group import ProcessGroup

WORKERS = "Several workers"


@dataclass(frozen=True)
class Workers(OptionGroup):
    """How many workers train together, and where."""

    panel: ClassVar = WORKERS
    count: Annotated[
        int,
        typer.Option("--workers", min=1, help="Processes on this machine that train together, each on its part of every batch."),
    ] = 1
    nodes: Annotated[
        int,
        typer.Option(
            "--nodes",
            min=1,
            help="Machines; run this command on each. The network between them must be private.",
        ),
    ] = 1
    node_rank: Annotated[int | None, typer.Option("--node-rank", min=0, help="Number of this machine, from 0.")] = None
    master_address: Annotated[str | None, typer.Option("--master-address", help="Address of the first machine.")] = None
    master_port: Annotated[
        int | None,
        typer.Option(
            "--master-port", min=1, max=65535, help=f"Port of the first machine where all workers meet; {launch.PORT} by default."
        ),
    ] = None
    max_restarts: Annotated[
        int, typer.Option("--max-restarts", min=0, help="How many times to restart after a failure that may not come again.")
    ] = 0
    worker_timeout: Annotated[float, typer.Option("--worker-timeout", help="Seconds to wait for a worker that is late.")] = 60.0

    @property
    def total(self) -> int:
        """Number of workers on all machines."""
        return self.count * self.nodes

    @property
    def is_alone(self) -> bool:
        """True if this process trains without others."""
        return self.total == 1 and not launch.is_worker()

    def machines(self) -> launch.Machines:
        """Return the machines of the run.

        Raises:
            typer.BadParameter: as ``Machines.of_options``.
        """
        return launch.Machines.of_options(self.nodes, self.node_rank, self.master_address, self.master_port)

    def check(self) -> None:
        """Raise typer.BadParameter if these options contradict each other or have no effect."""
        if self.worker_timeout <= 0:
            raise typer.BadParameter(f"--worker-timeout {self.worker_timeout:g}: give a number of seconds above 0")
        self.machines()
        if self.is_alone and "worker_timeout" in self.named:
            raise typer.BadParameter(
                "--worker-timeout says how long workers wait for each other, and one alone trains here: give --workers 2 or "
                "more, start with torchrun, or leave it out"
            )
        if self.max_restarts and self.total == 1:
            raise typer.BadParameter(
                "--max-restarts starts the workers of --workers again: give --workers 2 or more; torchrun has an option of its "
                "own for its workers"
            )


@dataclass(frozen=True)
class Exchange(OptionGroup):
    """How workers exchange gradients, statistics and the optimizer's state."""

    panel: ClassVar = WORKERS
    deterministic: Annotated[
        bool,
        typer.Option("--deterministic", help="Sum over the workers in the order of their ranks: runs have the same bits."),
    ] = False
    compression: Annotated[
        str | None,
        typer.Option(
            "--compression",
            metavar="TYPE",
            help="Send gradients in 16 bits: float16 or bfloat16.",
        ),
    ] = None
    bucket_size: Annotated[
        int | None,
        typer.Option(
            "--bucket-size",
            min=1,
            metavar="BYTES",
            help="Bytes of gradients in one exchange, which overlaps with the backward pass; 25 MiB by default.",
        ),
    ] = None
    share: Annotated[
        bool,
        typer.Option(
            "--share/--no-share", help="Let batch normalization layers that do not depend on each other share an exchange."
        ),
    ] = True
    shard_optimizer: Annotated[
        bool,
        typer.Option(
            "--shard-optimizer",
            help="Let each worker keep the optimizer state of only a share of the parameters.",
        ),
    ] = False
    shard_tables: Annotated[
        list[str] | None,
        typer.Option(
            "--shard-tables",
            metavar="NAME",
            help="Let each worker keep only some rows of an embedding table of --sparse: a name or a pattern, repeatable, "
            "or auto for all of them.",
        ),
    ] = None
    statistics: Annotated[
        str,
        typer.Option(
            "--statistics",
            metavar="KIND",
            help="Running statistics of batch normalization if those of workers differ: their mean, or those of rank0.",
        ),
    ] = "mean"
    synchronize_every: Annotated[
        int | None,
        typer.Option(
            "--synchronize-every",
            min=1,
            metavar="STEPS",
            help="Let workers step alone for this many steps, then average their weights.",
        ),
    ] = None

    def settings(self, is_alone: bool) -> dict[str, Any]:
        """Return the options that differ from their defaults, as ``burnish.DataParallel`` takes them.

        Args:
            is_alone: True for a single worker, which exchanges nothing.

        Raises:
            typer.BadParameter: an option is set for a single worker, or has a wrong value.
        """
        values = {field.name: (getattr(self, field.name), field.default) for field in fields(self) if field.name != "named"}
        changed: dict[str, Any] = {name: value for name, (value, default) in values.items() if value != default and value != []}
        changed |= {"shard_tables": "auto"} if self.shard_tables == ["auto"] else {}
        if not changed:
            return {}
        if is_alone:
            name = next(iter(changed)).replace("_", "-")
            option = "--no-share" if name == "share" else f"--{name}"
            raise typer.BadParameter(
                f"{option} says how workers exchange, and one alone trains here: give --workers 2 or more, start with torchrun, "
                "or leave it out"
            )
        from burnish.distributed import DataParallel

        try:
            DataParallel(**changed)
        except ConfigurationError as error:
            raise typer.BadParameter(str(error).removeprefix("DataParallel: ")) from error
        return changed


def join_workers(device: str | None, timeout: float, exchange: Mapping[str, Any]) -> tuple[DataParallel | None, ProcessGroup]:
    """Join the other workers if a launcher started several.

    Args:
        device: of this worker; None is the CPU.
        timeout: seconds to wait for a worker that is late.
        exchange: settings of ``burnish.DataParallel``.

    Returns:
        The ``parallel`` option of the trainer, and the group of the workers.
    """
    from burnish.distributed.connection.joining import join
    from burnish.distributed.connection.process_group import ProcessGroup

    if not launch.is_worker():
        return None, ProcessGroup(0, 1)
    from burnish.cli.console import warn_with_rank
    from burnish.distributed import DataParallel

    launch.end_with_launcher()
    group = join(device or "cpu", timeout=timeout)
    warn_with_rank(group.rank)
    return DataParallel(group=group, **exchange), group
