"""``burnish train``: an ONNX file and data go in, a tuned ONNX file comes out."""

from __future__ import annotations

from typing import TYPE_CHECKING

import typer

from burnish.cli import launch
from burnish.cli.compilation_options import Compilation, ModelArgument, for_language, is_program
from burnish.cli.configuration import OTHERWISE, Repetition, configuration_of
from burnish.cli.data_options import Pixels, TextOptions, check_data_options
from burnish.cli.optimizer_options import check_schedule
from burnish.cli.option_groups import takes_options
from burnish.cli.seeds import check_seeds, train_with_seeds
from burnish.cli.train_options import Course, Data, Results, Watching, check_results, run_folder
from burnish.cli.worker_options import Exchange, Workers, join_workers

if TYPE_CHECKING:
    from burnish.training import TrainingResult


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
    is_program(model)  # refuses the folder of a run
    folder = run_folder(model, results)
    check_results(folder, results, watching, data, model)
    check_schedule(compilation.optimizer.schedule, compilation.optimizer.warmup, compilation.optimizer.lr)
    workers.check()
    watching.check()
    check_seeds(repetition.seeds, results, watching.report, workers.total)
    check_data_options(
        data.data,
        data.eval_data,
        label=data.label,
        image_size=data.image_size,
        pixels=pixels.first_named,
        missing=data.missing,
    )
    settings = exchange.settings(workers.is_alone)
    command = context.meta["burnish.arguments"]
    if workers.total > 1 and not launch.is_worker():
        each_step = "synchronize_every" not in settings
        launch.check_together(workers.total, course.engine, compilation.options.norm, each_step)
        launch.launch(command, workers.count, workers.max_restarts, launch.resuming(command), workers.machines())
        return
    if workers.count > 1:
        launch.check_count(workers.count)
    from burnish.cli.training_run import TrainingRun

    parallel, group = join_workers(course.device, workers.worker_timeout, settings)
    compilation = for_language(compilation, texts)

    def run(course: Course, results: Results) -> TrainingResult | None:
        configuration = configuration_of(context, seed=course.seed)
        watched = watching.of_seed(course.seed, repetition.seeds)
        options = (data, pixels, texts, compilation, course, results, watched)
        otherwise = context.meta.get(OTHERWISE, ())
        return TrainingRun(model, *options, command, configuration, parallel, group, otherwise=otherwise).train()

    train_with_seeds(repetition.seeds, course, results, folder, run)
