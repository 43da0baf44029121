"""``burnish train``: tune an ONNX file on data, with one worker or several."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

import typer

from burnish.cli import launch
from burnish.cli.compilation_options import Compilation, ModelArgument, for_language, is_program
from burnish.cli.data_options import Pixels, TextOptions
from burnish.cli.optimizer_options import check_schedule
from burnish.cli.option_groups import OptionGroup, takes_options
from burnish.cli.repetition import Repetition, check_run, configuration_of, train_with_seeds
from burnish.cli.resumption import OTHERWISE, own_options
from burnish.cli.run_folders import claimed, claimed_together, folder_asked
from burnish.cli.train_options import Course, Data, Results, Watching
from burnish.distributed.exchange_options import ExchangeOptions
from burnish.errors import ConfigurationError

if TYPE_CHECKING:
    from burnish.distributed import DataParallel
    from burnish.distributed.connection.process_group import ProcessGroup
    from burnish.training import TrainingResult


WORKERS = "Several workers"


@dataclass(frozen=True)
class Workers(OptionGroup):
    """The number of workers that train together, and their machines."""

    panel: ClassVar = WORKERS
    count: Annotated[
        int,
        typer.Option(
            "--workers", "-w", min=1, help="Processes on this machine that train together, each on a part of every batch."
        ),
    ] = 1
    nodes: Annotated[
        int,
        typer.Option(
            "--nodes",
            min=1,
            help="Machines; run this command on each, on a private network.",
        ),
    ] = 1
    node_rank: Annotated[int | None, typer.Option("--node-rank", min=0, help="Number of this machine, from 0.")] = None
    master_address: Annotated[str | None, typer.Option("--master-address", help="Address of the first machine.")] = None
    master_port: Annotated[
        int | None,
        typer.Option(
            "--master-port",
            min=1,
            max=65535,
            help="Port of the first machine, where all workers meet.",
            show_default=str(launch.PORT),
        ),
    ] = None
    max_restarts: Annotated[
        int, typer.Option("--max-restarts", min=0, help="Restarts after a failure that may not come again.")
    ] = 0
    worker_timeout: Annotated[float, typer.Option("--worker-timeout", help="Seconds to wait for a worker that is late.")] = 60.0

    @property
    def total(self) -> int:
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
class Exchange(OptionGroup, ExchangeOptions):
    """The exchange of gradients, statistics and optimizer state among workers."""

    panel: ClassVar = WORKERS

    def settings(self, is_alone: bool) -> dict[str, Any]:
        """Return the options that differ from their defaults, for ``burnish.DataParallel``.

        Args:
            is_alone: True for a single worker, which exchanges nothing.

        Raises:
            typer.BadParameter: an option is set for a single worker, or has a wrong value.
        """
        values = {field.name: (getattr(self, field.name), field.default) for field in fields(ExchangeOptions)}
        changed: dict[str, Any] = {name: value for name, (value, default) in values.items() if value != default}
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
        device: device of this worker; None is the CPU.
        timeout: seconds to wait for a late worker.
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


@takes_options()
def train(
    context: typer.Context,
    model: ModelArgument,
    *,
    data: Data,
    pixels: Pixels,
    texts: TextOptions,
    compilation: Compilation,
    course: Course,
    workers: Workers,
    exchange: Exchange,
    results: Results,
    repetition: Repetition,
    watching: Watching,
) -> None:
    """Train a model on data."""
    if results.resume and results.overwrite:
        raise typer.BadParameter("--resume goes on with a run and --overwrite drops it; give one of them")
    if course.start_from is not None and (results.resume or course.reinitialize):
        raise typer.BadParameter("--start-from says where a new run starts; leave out --resume and --reinitialize")
    is_program(model)  # rejects the folder of a run
    results = replace(results, folder=results.folder or launch.claimed_folder())
    base = folder_asked(model, results)
    check_schedule(compilation.optimizer.schedule, compilation.optimizer.warmup, compilation.optimizer.lr)
    workers.check()
    check_run(model, base, data, pixels, results, watching, repetition.seeds, workers.total)
    settings = exchange.settings(workers.is_alone)
    command = context.meta["burnish.arguments"]
    if workers.total > 1 and not launch.is_worker():
        each_step = "synchronize_every" not in settings
        launch.check_together(workers.total, course.engine, compilation.options.norm, each_step)
        machines = workers.machines()
        # The first worker writes, and its machine has claimed the folder.
        with claimed(base, results) if machines.rank == 0 else nullcontext(base) as folder:
            launch.launch("train", command, folder, workers.count, workers.max_restarts, machines)
        return
    if workers.count > 1:
        launch.check_count(workers.count)
    from burnish.cli.training_run import TrainingRun

    parallel, group = join_workers(course.device, workers.worker_timeout, settings)
    compilation = for_language(compilation, texts)
    with claimed_together(group, base, results) as folder:

        def run(course: Course, results: Results) -> TrainingResult | None:
            configuration = configuration_of(context, seed=course.seed)
            watched = watching.of_seed(course.seed, repetition.seeds)
            options = (data, pixels, texts, compilation, course, results, watched)
            return TrainingRun(
                model,
                *options,
                command,
                configuration,
                parallel,
                group,
                otherwise=context.meta.get(OTHERWISE, ()),
                going_on=launch.resuming("train", folder),
                own_options=own_options(context),
            ).train()

        train_with_seeds(repetition.seeds, course, replace(results, folder=folder), folder, run)
