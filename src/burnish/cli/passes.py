"""``burnish passes``: the stages of compilation, and the changes of each pass to a model."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.table import Table
from rich.text import Text

from burnish.cli.console import cell, counted, output
from burnish.errors import ConfigurationError

if TYPE_CHECKING:
    from burnish.graph.stage import PassRecord, Stage

ENGINES = ("onnxruntime", "torch", "reference")


def passes(
    model: Annotated[Path | None, typer.Argument(metavar="MODEL", help="An ONNX file; without one, stages are listed.")] = None,
    engine: Annotated[
        str, typer.Option("--engine", help="Engine whose stages are listed: onnxruntime, torch or reference.")
    ] = "onnxruntime",
    stage: Annotated[
        str | None, typer.Option("--stage", help="Show one stage alone, such as LOWERED.", show_default="all")
    ] = None,
) -> None:
    """List the passes of compilation, or what each did to a model."""
    if engine not in ENGINES:
        raise ConfigurationError(f"--engine: there are no stages of '{engine}'; choose among {', '.join(ENGINES)}")
    stages = _stages(engine)
    if stage is not None and stage.upper() not in stages:
        raise ConfigurationError(f"--stage: there is no stage '{stage}'; choose among {', '.join(stages)}")
    chosen = list(stages) if stage is None else [stage.upper()]
    if model is None:
        for name in chosen:
            _list(stages[name])
        return
    for name, graph, records in _run(model, engine):
        if name in chosen:
            _show(name, graph, records)


def _stages(engine: str) -> dict[str, Stage[Any]]:
    from burnish import engines
    from burnish.distributed.derivation import DISTRIBUTED
    from burnish.files.export import EXPORTED
    from burnish.importer.canonical import CANONICAL, FOLDED, READ, SHAPES
    from burnish.modes import INFERENCE, TRAINING
    from burnish.rewriting.stages import HOISTED, JOINED, LOWERED, RECOGNIZED, RECOGNIZED_IN_MODE, RECOGNIZED_TO_TRAIN

    engines.get(engine)  # raises an error if its package is not installed
    stages: list[Stage[Any]] = [READ, SHAPES, CANONICAL, FOLDED, RECOGNIZED, RECOGNIZED_TO_TRAIN, HOISTED, TRAINING, INFERENCE]
    stages += [RECOGNIZED_IN_MODE, DISTRIBUTED, LOWERED, JOINED, EXPORTED]
    if engine == "onnxruntime":
        from burnish.engines.onnxruntime.kernels import ONNXRUNTIME_KERNELS

        stages.append(ONNXRUNTIME_KERNELS)
    elif engine == "torch":
        from burnish.engines.torch.fusion import TORCH

        stages.append(TORCH)
    return {stage.name: stage for stage in stages}


def _run(model: Path, engine: str) -> list[tuple[str, str, list[PassRecord]]]:
    """The work of each stage while a model is compiled and takes a step: its name, the graph, and a record for each pass."""
    import burnish
    from burnish.data.random_data import random_batches
    from burnish.files.export import export_inference
    from burnish.graph.stage import observing

    seen: list[tuple[str, str, list[PassRecord]]] = []
    with observing(lambda name, graph, records: seen.append((name, graph.graph.name or "", records))):
        program = burnish.compile(model)
        for graph in ("step", "predict"):
            program.graphs[graph]
        session, batch = burnish.Session(program, engine=engine), next(random_batches(program))
        session.step(batch)  # engines make a graph when they first run it
        session.evaluate(batch)
        session.predict({entry.name: batch[entry.name] for entry in program.signature["predict"].inputs if entry.name in batch})
        export_inference(program, program.initial_state(seed=0))
    return seen


def _list(stage: Stage[Any]) -> None:
    from burnish.graph.stage import Fallback, Repeat

    console = output()
    console.print(stage.name)
    for element in stage.passes:
        if isinstance(element, Repeat):
            console.print(f"  repeated, at most {counted(element.at_most, 'time')}:")
            for item in element.passes:
                console.print(f"    {item.name}")
        elif isinstance(element, Fallback):
            repairs = ", ".join(item.name for item in element.repairs)
            console.print(f"  {element.attempt.name}, and again after {repairs} where it fails")
        else:
            console.print(f"  {element.name}")


def _show(name: str, graph: str, records: list[PassRecord]) -> None:
    table = Table(title=f"{name} of '{graph}'", title_justify="left", box=None)
    for heading in ("Pass", "Changed", "ms", "Note"):
        table.add_column(heading)
    for record in records:
        changed = "yes" if record.changed else ""
        notes = Text("\n").join(cell(note) for note in record.note.split("; "))
        table.add_row(cell(record.name), changed, f"{record.seconds * 1e3:.1f}", notes)
    output().print(table)
