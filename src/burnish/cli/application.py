"""The command ``burnish``: its subcommands, and the handling of errors."""

from __future__ import annotations

import errno
import signal
from collections.abc import Iterable
from contextlib import nullcontext
from typing import Any, NoReturn

import typer
from typer.core import TyperGroup

from burnish.cli.check import check
from burnish.cli.compare import compare
from burnish.cli.compile import compile
from burnish.cli.console import errors, print_error, warnings_in_words
from burnish.cli.demo import demo
from burnish.cli.doctor import doctor
from burnish.cli.early_interrupt import stop_at_once
from burnish.cli.export import export, package
from burnish.cli.finetune import finetune
from burnish.cli.help import Command, described, group_page, usage
from burnish.cli.inspect import inspect
from burnish.cli.launch import INTERRUPTED, TERMINATED, exit_status, has_joined, is_first_of_machine, other_rank
from burnish.cli.new import new
from burnish.cli.passes import passes
from burnish.cli.predict import evaluate, predict
from burnish.cli.quantize import quantize
from burnish.cli.report import report
from burnish.cli.resumption import RunCommand
from burnish.cli.train import train
from burnish.errors import BurnishError, NonFiniteLossError, WorkerError
from burnish.settings import is_number_text, suggestion
from burnish.stopping import Terminated
from burnish.transfer_progress import transfers_reported
from burnish.version import __version__

DEBUG = "--debug"
WRONG_USE = 2
"""The exit status of an invalid command line."""
UsageError: Any = typer.BadParameter.__mro__[1]


class Group(TyperGroup):
    """The group of commands, which prints an error of burnish as one message and exits with 1.

    Ctrl-C exits with 130, SIGTERM with 143. Warnings are printed in words. With ``--debug``, which may be anywhere, errors and
    warnings show their place in the code.
    """

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        for command in self.commands.values():
            for parameter in command.params:
                _refuse_odd_texts(parameter)

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        ctx.meta["burnish.arguments"] = list(args)
        ctx.meta["burnish.debug"] = DEBUG in args
        try:
            if not args and not ctx.resilient_parsing:
                typer.echo(self.get_help(ctx))
                raise typer.Exit(WRONG_USE)
            return super().parse_args(ctx, [argument for argument in args if argument != DEBUG])
        except UsageError as error:
            self._refuse(error, ctx)
        except OSError as error:  # from the help and the version, which are printed here
            if ctx.meta["burnish.debug"] or _is_broken_pipe(error):
                raise
            print_error(_in_words(error))
            raise typer.Exit(1) from error

    def get_help(self, ctx: Any) -> str:
        return group_page(self, ctx)

    def invoke(self, ctx: Any) -> object:
        if signal.getsignal(signal.SIGINT) is stop_at_once:
            signal.signal(signal.SIGINT, signal.default_int_handler)
        try:
            with transfers_reported(_say), nullcontext() if ctx.meta["burnish.debug"] else warnings_in_words():
                return super().invoke(ctx)
        except UsageError as error:
            self._refuse(error, ctx)
        except (BurnishError, OSError, UnicodeError) as error:
            if ctx.meta["burnish.debug"] or _is_broken_pipe(error):
                raise
            rank = other_rank()
            # Only the first worker of each machine reports a common stop; a worker that never joined reports its own.
            if is_first_of_machine() or not has_joined() or not isinstance(error, WorkerError | NonFiniteLossError):
                prefix = "" if rank is None else f"[rank {rank}] "
                print_error(_in_words(error), f"{prefix}error: ")
            raise typer.Exit(exit_status(error)) from error
        except KeyboardInterrupt as interrupt:
            if other_rank() is None:
                for line in (str(interrupt) or "Stopped.").split("\n"):
                    errors().print(line, style="yellow")
            is_terminated = isinstance(interrupt, Terminated) or getattr(interrupt, "signal", None) == signal.SIGTERM
            raise typer.Exit(TERMINATED if is_terminated else INTERRUPTED) from interrupt

    def _refuse(self, error: Any, ctx: Any) -> NoReturn:
        context = error.ctx or ctx
        command, path = context.command, context.command_path
        message = _said(error)
        option = getattr(error, "option_name", None)
        if option is not None and command is not self:
            owners = [f"burnish {name}" for name, other in self.commands.items() if option in _names_of(other)]
            hint = f"; it is one of {' and '.join(owners)}" if owners else suggestion(option, _names_of(command))
            message = f"burnish {command.name} has no option {option}{hint}"
        print_error(message)
        if command is self:
            errors().print(f"  {path} --help lists the commands")
        else:
            if (least := _least(getattr(error, "param", None))) is not None:
                errors().print(f"  give a number of {least:g} or more")
            errors().print(f"  usage: {usage(path, described(command))}; {path} --help lists the options")
        raise typer.Exit(WRONG_USE) from error


def _least(parameter: Any) -> float | None:
    least = getattr(parameter, "min", getattr(getattr(parameter, "type", None), "min", None))
    return least if isinstance(least, int | float) else None


def _said(error: Any) -> str:
    """The error of a command line, with options by their long names."""
    parameter = getattr(error, "param", None)
    if type(error) is typer.BadParameter and parameter is None:
        return str(error.message)
    said, names = str(error.format_message()), getattr(parameter, "opts", None) or [""]
    return said.replace(" / ".join(f"'{name}'" for name in names), f"'{max(names, key=len)}'") if len(names) > 1 else said


def _names_of(command: Any) -> list[str]:
    return [name for parameter in command.params for name in (*parameter.opts, *parameter.secondary_opts) if name[:1] == "-"]


def _refuse_odd_texts(parameter: Any) -> None:
    """Make an option or argument reject an empty text, and a number in other digits than 0 to 9.

    As a path, an empty text is the current folder: ``--output "$UNSET"`` wrote there. Python reads ``1_0`` as 10.
    """
    process = parameter.process_value

    def process_plain(context: Any, value: Any) -> Any:
        if any(isinstance(text, str) and not text.strip() for text in _listed(value)):
            raise typer.BadParameter("it is empty: give a value, or leave it out.", ctx=context, param=parameter)
        processed = process(context, value)
        for text, number in zip(_listed(value), _listed(processed), strict=False):
            if isinstance(text, str) and type(number) in (int, float) and not is_number_text(text):
                raise typer.BadParameter(f"{text!r} is no number in the digits 0 to 9.", ctx=context, param=parameter)
        return processed

    parameter.process_value = process_plain


def _listed(value: Any) -> Iterable[Any]:
    return value if isinstance(value, list | tuple) else (value,)


def _is_broken_pipe(error: BaseException) -> bool:
    """True if nobody reads the output any more, as after ``| head``: the command then ends silently."""
    return isinstance(error, OSError) and error.errno == errno.EPIPE


def _in_words(error: BaseException) -> str:
    """The text of an error; for one of the system, with a remedy."""
    if isinstance(error, UnicodeError):
        return f"{error}: a name or a text is no UTF-8; rename the file, or save the text in UTF-8"
    if not isinstance(error, OSError):
        return str(error)
    what = error.strerror or str(error) or type(error).__name__
    named = [f"'{name}'" for name in (error.filename, error.filename2) if name is not None]
    problem = f"{' and '.join(named)}: {what}" if named else what
    if isinstance(error, PermissionError):
        return f"{problem}; choose a file or a folder that you may use, or change its permissions"
    is_full = errno.errorcode.get(error.errno or 0) in ("ENOSPC", "EDQUOT")
    return f"{problem}; free space on the disk, or choose a folder on another one" if is_full else problem


def _say(line: str) -> None:
    """Print the progress of a large file; with several workers, only on the first of each machine."""
    if is_first_of_machine():
        errors().print(line)


app = typer.Typer(
    name="burnish",
    cls=Group,
    context_settings={"help_option_names": ["--help", "-h"]},
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


COMMANDS = (new, train, finetune, quantize, predict, evaluate, report, compile, inspect, check, compare, export, package)
for command in (*COMMANDS, passes, doctor, demo):
    app.command(cls=RunCommand if command in (train, finetune) else Command)(command)
