"""The command ``burnish``: its subcommands, and how errors leave it."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import typer
from typer.core import TyperGroup

from burnish.cli.check import check
from burnish.cli.compare import compare
from burnish.cli.compile import compile
from burnish.cli.console import errors, warnings_in_words
from burnish.cli.demo import demo
from burnish.cli.evaluate import evaluate
from burnish.cli.export import export
from burnish.cli.finetune import finetune
from burnish.cli.inspect import inspect
from burnish.cli.launch import INTERRUPTED, exit_status, has_joined, is_first_of_machine, other_rank
from burnish.cli.package import package
from burnish.cli.predict import predict
from burnish.cli.quantize import quantize
from burnish.cli.report import report
from burnish.cli.train import train
from burnish.errors import BurnishError, NonFiniteLossError, WorkerError
from burnish.transfers import transfers_reported
from burnish.version import __version__

DEBUG = "--debug"


class Group(TyperGroup):
    """Prints an error of burnish as one message and exits with 1; Ctrl-C exits with 130. Warnings are printed in words.

    With ``--debug``, which may stand anywhere, errors and warnings say where in the code they come from.
    """

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        ctx.meta["burnish.arguments"] = list(args)
        ctx.meta["burnish.debug"] = DEBUG in args
        return super().parse_args(ctx, [argument for argument in args if argument != DEBUG])

    def invoke(self, ctx: Any) -> object:
        try:
            with transfers_reported(_say), nullcontext() if ctx.meta["burnish.debug"] else warnings_in_words():
                return super().invoke(ctx)
        except BurnishError as error:
            if ctx.meta["burnish.debug"]:
                raise
            rank = other_rank()
            # What stops all workers, the first of each machine says; and one that never came to the others says why.
            if is_first_of_machine() or not has_joined() or not isinstance(error, WorkerError | NonFiniteLossError):
                prefix = "" if rank is None else f"[rank {rank}] "
                errors().print(f"{prefix}error: {error}", style="red")
            raise typer.Exit(exit_status(error)) from error
        except KeyboardInterrupt as interrupt:
            if other_rank() is None:
                for line in (str(interrupt) or "Stopped.").split("\n"):
                    errors().print(line, style="yellow")
            raise typer.Exit(INTERRUPTED) from interrupt


def _say(line: str) -> None:
    """Print how far a large file is; of several workers, the first of each machine says it."""
    if is_first_of_machine():
        errors().print(line)


app = typer.Typer(
    cls=Group,
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    help="Train ONNX models on any ONNX runtime.",
)


def _print_version(asked_for: bool) -> None:
    if asked_for:
        typer.echo(f"burnish {__version__}")
        raise typer.Exit


@app.callback()
def options(
    debug: bool = typer.Option(False, DEBUG, help="Show where in the code errors and warnings come from."),
    version: bool = typer.Option(False, "--version", help="Print the version.", callback=_print_version, is_eager=True),
) -> None:
    """Train ONNX models on any ONNX runtime."""


for command in (train, finetune, quantize, predict, evaluate, report, compile, inspect, check, compare, export, package, demo):
    app.command()(command)
