"""Options for the optimizer and what goes around it, and the optimizer they come to."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

import typer

from burnish.cli.option_groups import OptionGroup
from burnish.cli.schedule_options import CONSTANT
from burnish.settings import split

if TYPE_CHECKING:
    from burnish.optim import Optimizer
    from burnish.optim.groups import Overrides
    from burnish.program import Program

COMPILATION = "Compilation"
AVERAGE = "average"
"""What evaluation and export call the average that an optimizer keeps."""


@dataclass(frozen=True)
class OptimizerOptions(OptionGroup):
    """The optimizer, and what goes around it."""

    panel: ClassVar = "Optimizer"
    optimizer: Annotated[
        str,
        typer.Option(
            "--optimizer",
            help="sgd, adamw or another name of docs/optimizers.md; settings behind a colon (rmsprop:centered=true).",
        ),
    ] = "sgd"
    lr: Annotated[float | None, typer.Option("--lr", help="Learning rate; by default the optimizer's.")] = None
    momentum: Annotated[
        float | None, typer.Option("--momentum", help="Momentum of sgd, by default 0.9, or of another that has one.")
    ] = None
    weight_decay: Annotated[float | None, typer.Option("--weight-decay", help="By default the optimizer's.")] = None
    decay_on: Annotated[
        str,
        typer.Option(
            "--decay-on",
            metavar="WHICH",
            help="all, or weights: no weight decay on biases and the parameters of normalization layers.",
        ),
    ] = "all"
    transform: Annotated[
        list[str] | None,
        typer.Option(
            "--transform",
            metavar="NAME:SETTINGS",
            help="Of the gradients, such as clip_by_global_norm:max_norm=1; may be given again, and they act in that order.",
        ),
    ] = None
    group: Annotated[
        list[str] | None,
        typer.Option(
            "--group",
            metavar="PATTERN=SETTINGS",
            help="Settings for the parameters of a name or pattern: 'stem*=lr_scale=0.1', 'head*=lr=0.01,weight_decay=0', "
            "'stem*=frozen', or another optimizer, 'embed*=adamw:lr=0.001'; may be given again, and the last that matches holds.",
        ),
    ] = None
    freeze: Annotated[
        list[str] | None,
        typer.Option(
            "--freeze",
            metavar="PATTERN",
            help="Leave parameters of this name or pattern as they are, such as 'stem*'; may be given again.",
        ),
    ] = None
    layer_decay: Annotated[
        float | None,
        typer.Option(
            "--layer-decay",
            metavar="FACTOR",
            help="Multiply the learning rate by this from each layer to the one before it, such as 0.9.",
        ),
    ] = None
    accumulate: Annotated[
        int,
        typer.Option(
            "--accumulate",
            min=1,
            metavar="STEPS",
            help="Update once in so many steps, by the mean of their gradients; --warmup and --schedule then count updates.",
        ),
    ] = 1
    average: Annotated[
        str | None,
        typer.Option(
            "--average",
            metavar="NAME",
            help="Keep an average of the weights, which is evaluated and exported: ema, swa, or with settings (ema:decay=0.99).",
        ),
    ] = None
    schedule: Annotated[
        str,
        typer.Option(
            "--schedule",
            help="Learning rate over the steps, computed in the program: constant, cosine, linear, one_cycle or another name of "
            "docs/schedules.md; settings behind a colon (step:every=100).",
            rich_help_panel=COMPILATION,
        ),
    ] = CONSTANT
    warmup: Annotated[
        int,
        typer.Option("--warmup", min=0, help="Steps of a linear rise of the learning rate first.", rich_help_panel=COMPILATION),
    ] = 0

    def built(self) -> Optimizer:
        """Return the optimizer with groups, transforms of the gradients and an average around it, and accumulation outermost.

        Raises:
            typer.BadParameter: options that the optimizer does not have, that contradict each other, or that cannot be read.
            ConfigurationError: there is no such optimizer, transform or setting.
        """
        from burnish import optim
        from burnish.optim.chain import TRANSFORMS
        from burnish.registry import Registry

        optimizer = self._grouped(self._plain())
        if self.layer_decay is not None:
            optimizer = optim.layerwise_decay(optimizer, self.layer_decay)
        if self.transform:
            optimizer = optim.chain(*map(TRANSFORMS.resolve, self.transform), optimizer)
        if self.average is not None:
            averages: Registry[Optimizer] = Registry("average", {"ema": optim.ema, "swa": optim.swa})
            name, settings = averages.read(self.average)
            optimizer = averages.make(name, {"optimizer": optimizer, **settings})
        return optim.accumulate(optimizer, self.accumulate) if self.accumulate > 1 else optimizer

    def _plain(self) -> Optimizer:
        """Return the optimizer alone; sgd has a momentum of 0.9 unless another is set."""
        from burnish import optim

        name, settings = optim.OPTIMIZERS.read(self.optimizer)
        supported = optim.get(name).options()
        for key in ("lr", "momentum", "weight_decay"):
            value, option = getattr(self, key), f"--{key.replace('_', '-')}"
            if value is None:
                continue
            if key not in supported:
                raise typer.BadParameter(
                    f"{name} takes no {option}; leave it out, or choose an optimizer that has one, such as sgd"
                )
            if key in settings:
                raise typer.BadParameter(f"{option} and '{self.optimizer}' both give the {key} of {name}: give one of them")
            settings[key] = value
        if name == "sgd":
            settings.setdefault("momentum", 0.9)
        return optim.get({"name": name, **settings})

    def _grouped(self, optimizer: Optimizer) -> Optimizer:
        """Return the optimizer with its parameter groups; what does not train goes before other groups."""
        from burnish import optim

        if self.decay_on not in ("all", "weights"):
            raise typer.BadParameter(f"--decay-on {self.decay_on}: give all, or weights to leave out biases and normalization")
        patterns: dict[str, Overrides] = {}
        for text in self.group or ():
            pattern, overrides = _read_group(text)
            if pattern in patterns:
                raise typer.BadParameter(f"--group gives '{pattern}' twice: give its settings at once, with commas between")
            patterns[pattern] = overrides
        for pattern in split(self.freeze or ()):
            patterns.pop(pattern, None)
            patterns[pattern] = "frozen"
        return optim.groups(optimizer, patterns, decay=self.decay_on) if patterns or self.decay_on != "all" else optimizer


def _read_group(text: str) -> tuple[str, Overrides]:
    """Return the pattern of a group and what it sets.

    Raises:
        typer.BadParameter: it is not written ``PATTERN=SETTINGS``.
        ConfigurationError: there is no such optimizer, or it has no such setting.
    """
    from burnish import optim
    from burnish.optim.groups import FROZEN
    from burnish.settings import read_settings

    pattern, _, what = (part.strip() for part in text.partition("="))
    if not pattern or not what:
        raise typer.BadParameter(f"--group {text}: give PATTERN=SETTINGS, such as 'stem*=lr_scale=0.1' or 'stem*=frozen'")
    if what == FROZEN:
        return pattern, FROZEN
    if ":" in what.partition("=")[0] or "=" not in what:
        return pattern, optim.get(what)  # type: ignore[return-value]  # no wrapper has a name that it is given by
    return pattern, read_settings(f"--group {pattern}", f"settings:{what}")[1]


def rate_of(options: dict[str, Any]) -> Any:
    """Return the learning rate in the options of an optimizer, or of the first optimizer inside it that has one."""
    while "lr" not in options and "optimizer" in options:
        options = options["optimizer"]
    return options.get("lr")


def kept_average(program: Program) -> str | None:
    """Return ``average``, as evaluation and export take it, for a program whose optimizer keeps one; else None."""
    from burnish.optim.slots import slot_of

    return AVERAGE if any(slot_of(entry.name) == AVERAGE for entry in program.signature.state) else None
