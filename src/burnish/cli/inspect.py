"""``burnish inspect``: what of a model would train."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from burnish.cli.console import counted, output

CONSTANTS_SHOWN = 10


def inspect(
    model: Annotated[
        Path, typer.Argument(metavar="MODEL", help="An ONNX file, a program, or the folder of a run.", show_default=False)
    ],
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Show what would train: parameters, statistics, constants, operators, and which of them lack a gradient."""
    from burnish.cli.summary import program_at, summarize, summarize_program

    program = program_at(model)
    summary = summarize(model) if program is None else summarize_program(program)
    if as_json:
        typer.echo(json.dumps(summary, indent=1))
    elif program is None:
        _print(summary, output())
    else:
        _print_program(summary, output())


def _print_program(summary: dict[str, Any], console: Console) -> None:
    def say(text: str) -> None:
        console.print(text, markup=False)

    say(f"{summary['program']}: a training program; {summary['trains']}")
    say("compiled with")
    for name, value in summary["options"].items():
        if name not in ("trainable", "norm_layers"):
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
        console.print(text, markup=False)

    say(f"{summary['model']}: opset {summary['opset']}")
    for direction in ("inputs", "outputs"):
        for value in summary[direction]:
            say(f"  {direction[:-1]:<7} {value['name']}  {value['dtype']} {_shape(value)}")
    prediction = summary["prediction"]
    names = [value["name"] for value in summary["outputs"]]
    if prediction is None:
        say(f"  the loss would read one of {', '.join(names)}: choose with --outputs")
    else:
        say(f"  the loss reads {prediction}" + ("" if prediction in names else ", behind the final softmax"))
    for kind, title in (("parameters", "parameters, which train"), ("statistics", "running statistics, which training updates")):
        total = sum(value["count"] for value in summary[kind])
        say(f"\n{title}: {total:,} in {counted(len(summary[kind]), 'tensor')}")
        _table(summary[kind], console)
    merged = summary["perhaps_merged"]
    if merged:
        names = list(merged)
        more = f" and {len(names) - CONSTANTS_SHOWN} more" if len(names) > CONSTANTS_SHOWN else ""
        shown = ", ".join(f"{name} ({merged[name]} layers)" for name in names[:CONSTANTS_SHOWN])
        say(f"  of one value, read by several layers, and trained as one: {shown}{more}")
        say("  where these were parameters of their own, export again with an exporter that does not merge them")
        say("  (torch.onnx.export(..., dynamo=True, optimize=False))")
    constants = summary["constants"]
    say(f"\nconstants, which stay as they are: {counted(len(constants), 'tensor')}")
    _table(constants[:CONSTANTS_SHOWN], console)
    if len(constants) > CONSTANTS_SHOWN:
        say(f"  and {len(constants) - CONSTANTS_SHOWN} more (--json lists them)")
    scalars = summary["scalars"]
    if scalars:
        more = f" and {len(scalars) - CONSTANTS_SHOWN} more" if len(scalars) > CONSTANTS_SHOWN else ""
        say(f"  scalars do not train, these among them: {', '.join(scalars[:CONSTANTS_SHOWN])}{more}")
    say(f"\noperators: {counted(sum(entry['count'] for entry in summary['operators']), 'node')}")
    for entry in summary["operators"]:
        say(f"  {entry['count']:>5}  {entry['operator']}" + ("  lacks a gradient" if entry["lacks_gradient"] else ""))
    if summary["nothing_trains"]:
        say(f"\nNothing would train: {summary['nothing_trains']}.")
    elif summary["lacking"]:
        say("\nThe loss depends on weights through these, which have no gradient:")
        for node in summary["lacking"]:
            say(f"  {node}")
    else:
        say("\nEvery operator between a parameter and the loss has a gradient.")


def _table(values: list[dict[str, Any]], console: Console) -> None:
    width = max((len(value["name"]) for value in values), default=0)
    for value in values:
        text = f"  {value['name']:<{width}}  {_shape(value):<20} {value.get('count', 0):>12,}  {value['dtype']}"
        console.print(text, markup=False)


def _shape(value: dict[str, Any]) -> str:
    if value["shape"] is None:
        return "of unknown shape"
    return "[" + ", ".join("?" if extent is None else str(extent) for extent in value["shape"]) + "]"
