"""Options that put adapters beside the layers of a model."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any, ClassVar

import typer

from burnish.cli.option_groups import OptionGroup

SETTINGS = ("rank", "alpha", "variant", "dropout", "rslora")


@dataclass(frozen=True)
class AdapterOptions(OptionGroup):
    """Adapters beside layers, which then stay as they are."""

    panel: ClassVar = "Adapters"
    lora: Annotated[
        str | None,
        typer.Option(
            "--lora",
            metavar="SETTINGS",
            help="Train adapters beside the layers, which stay as they are: 'rank=8,alpha=16'; further settings are "
            "variant=lora, dora or ia3, dropout=0.1 and rslora=true.",
        ),
    ] = None
    lora_layers: Annotated[
        list[str] | None,
        typer.Option(
            "--lora-layers",
            metavar="PATTERN",
            help="Only beside layers, nodes or weights of this name or pattern, such as '*.query'; may be given again. By "
            "default beside every matrix and convolution; embeddings are named.",
        ),
    ] = None

    def settings(self) -> dict[str, Any] | None:
        """Return what ``burnish.surgery.lora`` takes, or None for no adapters.

        Raises:
            typer.BadParameter: settings that cannot be read, or layers without settings.
        """
        from burnish.errors import ConfigurationError
        from burnish.settings import read_settings, suggestion

        if self.lora is None:
            if self.lora_layers:
                raise typer.BadParameter("--lora-layers says beside which layers adapters stand: give --lora too, such as rank=8")
            return None
        try:
            _, settings = read_settings("--lora", f"lora:{self.lora}")
        except ConfigurationError as error:
            raise typer.BadParameter(str(error).replace("'lora:", "'")) from error
        for name in settings:
            if name not in SETTINGS:
                known = ", ".join(SETTINGS)
                raise typer.BadParameter(f"--lora has no setting '{name}'{suggestion(name, SETTINGS)}; it has {known}")
        return {**settings, "patterns": self.lora_layers or None}
