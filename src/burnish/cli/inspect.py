"""``burnish inspect``: the trainable parts of a model."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from burnish.cli.compilation_options import BatchOption, BindOption
from burnish.cli.console import counted, echo, output
from burnish.cli.option_groups import values_of
from burnish.compiler.options import CompileOptions

CONSTANTS_SHOWN = 10
CLASSES_SHOWN = 20


def inspect(
    model: Annotated[
        Path, typer.Argument(metavar="MODEL", help="An ONNX file, a program, or the folder of a run.", show_default=False)
    ],
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    outputs: Annotated[
        str | None,
        typer.Option(
            "--outputs",
            metavar="NAME",
            help="Output that the loss would read, or several with commas between.",
            show_default="the only one",
        ),
    ] = None,
    batch: BatchOption = None,
    bind: BindOption = None,
) -> None:
    """Show which parts of a model would train.

    These are parameters, statistics, constants and operators, and which of them lack a gradient.
    """
    from burnish.cli.summary import judge, program_at, summarize_program

    program = program_at(model)
    if program is not None and outputs is not None:
        raise typer.BadParameter(f"--outputs is for a model, and '{model}' is a program, compiled with its own: leave it out")
    if program is not None and batch is not None:
        raise typer.BadParameter(f"--batch is for a model, and '{model}' is a program, compiled with its own: leave it out")
    if program is not None and bind:
        raise typer.BadParameter(f"--bind is for a model, and '{model}' is a program, compiled with its own: leave it out")
    if program is None:
        summary = judge(model, **values_of(CompileOptions, outputs=outputs, batch=batch, bind=bind))
    else:
        summary = summarize_program(program)
    if as_json:
        echo(json.dumps(summary, indent=1))
    elif program is None:
        _print(summary, output())
    else:
        _print_program(summary, output())


def _print_program(summary: dict[str, Any], console: Console) -> None:
    def say(text: str) -> None:
        console.print(text)

    say(f"{summary['program']}: a training program; {summary['trains']}")
    _say_data(summary, say)
    say("compiled with")
    for name, value in summary["options"].items():
        if name not in ("trainable", "norm_layers", "rounded_weights"):
            say(f"  {name:<16}  {value if isinstance(value, str) else json.dumps(value)}")
    say("a step takes, beside its state")
    for value in summary["inputs"]:
        say(f"  {value['role']:<16}  {value['name']}  {value['dtype']} {_shape(value)}")
    say("graphs")
    for name, nodes in summary["graphs"].items():
        say(f"  {name + '.onnx':<16}  {counted(nodes, 'node')}")
    say(summary["planned"])


def _print(summary: dict[str, Any], console: Console) -> None:
    def say(text: str = "") -> None:
        console.print(text)

    _say_signature(summary, say)
    for kind, title in (("parameters", "parameters, which train"), ("statistics", "running statistics, which training updates")):
        say()
        say(f"{title}: {_extent_of(summary[kind])}")
        _say_tensors(summary[kind], say)
        if kind == "parameters" and summary["rounded"]:
            dtypes = " and ".join(summary["rounded"])
            say(f"  weights in {dtypes} train in float32, which all is computed in; an export rounds them to {dtypes} again")
    _say_merged(summary["perhaps_merged"], say)
    _say_folded(summary["folded"], summary["perhaps_folded"], say)
    if buffers := summary["buffers"]:
        say()
        say(f"buffers of the exported module, which train only where trainable names them: {_extent_of(buffers)}")
        _say_tensors(buffers, say)
    if preparing := summary["preparing"]:
        say()
        say(f"constants that prepare an input, which train only where trainable names them: {_extent_of(preparing)}")
        _say_tensors(preparing, say)
    if unreached := summary["unreached"]:
        say()
        say(f"weights that no gradient reaches, and that stay as they are: {_extent_of(unreached)}")
        _say_tensors(unreached, say)
    _say_constants(summary["constants"], summary["scalars"], say)
    _say_operators(summary, say)


def _say_signature(summary: dict[str, Any], say: Callable[[str], None]) -> None:
    """Print the inputs and outputs, and the outputs that the loss reads."""
    say(f"{summary['model']}: opset {summary['opset']}")
    for direction in ("inputs", "outputs"):
        for value in summary[direction]:
            say(f"  {direction[:-1]:<7} {value['name']}  {value['dtype']} {_shape(value)}")
    _say_data(summary, say)
    if not summary["predictions"]:
        names = [value["name"] for value in summary["outputs"]]
        say(f"  the loss would read one of {', '.join(names)}: choose with --outputs")
    for prediction in summary["predictions"]:
        if prediction["stepped_over"] is not None:
            say(f"  the loss reads {prediction['reads']}, before {prediction['stepped_over']}, which it applies itself")
        elif prediction["bounded_by"] is not None:
            say(f"  the loss reads {prediction['reads']}, which {prediction['bounded_by']} bounds to [0, 1]: choose a loss of")
            say("  probabilities, or let it read what comes before (--outputs takes any value of the model)")
        else:
            say(f"  the loss reads {prediction['reads']}")


def _say_merged(layers: dict[str, int], say: Callable[[str], None]) -> None:
    """Print parameters that an exporter may have merged; ``layers`` counts the layers that read each."""
    if layers:
        parameters = _first([f"{name} ({count} layers)" for name, count in layers.items()])
        say(f"  of one value, read by several layers, and trained as one: {parameters}")
        say("  where these were parameters of their own, export again with an exporter that does not merge them")
        say("  (torch.onnx.export(..., dynamo=True, optimize=False))")


def _say_constants(constants: list[dict[str, Any]], scalars: list[str], say: Callable[[str], None]) -> None:
    say("")
    say(f"constants, which stay as they are: {counted(len(constants), 'tensor')}")
    _say_tensors(constants[:CONSTANTS_SHOWN], say)
    if len(constants) > CONSTANTS_SHOWN:
        say(f"  and {len(constants) - CONSTANTS_SHOWN} more (--json lists them)")
    if scalars:
        say(f"  scalars do not train unless trainable names them, these among them: {_first(scalars)}")


def _say_operators(summary: dict[str, Any], say: Callable[[str], None]) -> None:
    """Print the operators, and obstacles between the weights and the loss."""
    say("")
    say(f"operators: {counted(sum(entry['count'] for entry in summary['operators']), 'node')}")
    for entry in summary["operators"]:
        say(f"  {entry['count']:>5}  {entry['operator']}" + ("  lacks a gradient" if entry["lacks_gradient"] else ""))
    say("")
    if summary["nothing_trains"]:
        say(f"Nothing would train: {summary['nothing_trains']}.")
    elif summary["lacking"]:
        say("The loss depends on weights through these, which have no gradient:")
        for node in summary["lacking"]:
            say(f"  {node}")
    elif summary["refused"]:
        say(f"It cannot be trained as it is: {summary['refused']}")
    else:
        say("Every operator between a parameter and the loss has a gradient.")


def _say_folded(layers: list[str], convolutions: int, say: Callable[[str], None]) -> None:
    """Print layers with folded batch normalization, recorded by the file or suspected."""
    if layers:
        say(f"  batch normalization was folded into {counted(len(layers), 'layer')}, which train without it: {_first(layers)}.")
        say("  burnish.surgery.insert puts in new layers that change nothing at first; or export again with it kept")
        say("  (torch.onnx.export(..., dynamo=True, optimize=False); burnish export ... --no-fold)")
    elif convolutions:
        say(f"  {convolutions} convolutions, all with a bias and none normalized: if batch normalization was folded into them,")
        say("  they train without it. burnish.surgery.insert puts in new layers that change nothing at first; or export again")
        say("  with it kept (torch.onnx.export(..., dynamo=True, optimize=False); burnish export ... --no-fold)")


def _say_data(summary: dict[str, Any], say: Callable[[str], None]) -> None:
    if "columns" in summary:
        say(f"columns: {summary['columns']}")
    if "pixels" in summary:
        say(f"pixels: {summary['pixels']}")
    if "sound" in summary:
        say(f"sound: {summary['sound']}")
    if "classes" in summary:
        names = summary["classes"]
        more = f" and {len(names) - CLASSES_SHOWN} more (--json lists them)" if len(names) > CLASSES_SHOWN else ""
        say(f"classes: {', '.join(names[:CLASSES_SHOWN])}{more}")


def _first(texts: list[str]) -> str:
    more = f" and {len(texts) - CONSTANTS_SHOWN} more" if len(texts) > CONSTANTS_SHOWN else ""
    return ", ".join(texts[:CONSTANTS_SHOWN]) + more


def _extent_of(values: list[dict[str, Any]]) -> str:
    return f"{sum(value['count'] for value in values):,} in {counted(len(values), 'tensor')}"


def _say_tensors(values: list[dict[str, Any]], say: Callable[[str], None]) -> None:
    width = max((len(value["name"]) for value in values), default=0)
    for value in values:
        text = f"  {value['name']:<{width}}  {_shape(value):<20} {value.get('count', 0):>12,}  {value['dtype']}"
        say(text + (f"  {value['reason']}" if "reason" in value else ""))


def _shape(value: dict[str, Any]) -> str:
    if value["shape"] is None:
        return "of unknown shape"
    return "[" + ", ".join("?" if extent is None else str(extent) for extent in value["shape"]) + "]"
