"""Options that put adapters beside the layers of a model, and that say in which files they are written."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

import typer

from burnish.cli.option_groups import OptionGroup

if TYPE_CHECKING:
    import onnx_ir as ir

SETTINGS = ("rank", "alpha", "variant", "dropout", "rslora")
IA3 = "ia3"
FORMS = {
    "kept": "the model, with its adapters beside its weights",
    "apart": "the model; ONNX Runtime gives it the adapters in the .onnx_adapter beside it",
    "inputs": "the model; its adapters are inputs, with their values in the .safetensors beside it",
    "peft": "the adapters, as PEFT reads them",
}
"""What is written of a run with adapters, where they are not merged."""


@dataclass(frozen=True)
class AdapterOptions(OptionGroup):
    """Adapters beside layers, which then stay as they are."""

    panel: ClassVar = "Adapters"
    adapter: Annotated[
        str | None,
        typer.Option(
            "--adapter",
            metavar="VARIANT",
            help="Train adapters beside the layers, which stay as they are: lora, dora or ia3.",
        ),
    ] = None
    rank: Annotated[int | None, typer.Option("--rank", min=1, help="Of the adapters lora and dora; by default 8.")] = None
    alpha: Annotated[
        float | None, typer.Option("--alpha", help="What lora and dora add is multiplied by alpha / rank; by default it is rank.")
    ] = None
    lora: Annotated[
        str | None,
        typer.Option(
            "--lora",
            metavar="SETTINGS",
            help="The same in one: 'rank=8,alpha=16'; further settings are variant=lora, dora or ia3, dropout=0.1 and "
            "rslora=true.",
        ),
    ] = None
    lora_layers: Annotated[
        list[str] | None,
        typer.Option(
            "--lora-layers",
            "--adapter-layers",
            metavar="PATTERN",
            help="Only beside layers, nodes or weights of this name or pattern, such as '*.query'; may be given again. By "
            "default beside every matrix and convolution; embeddings are named.",
        ),
    ] = None
    adapter_from: Annotated[
        Path | None,
        typer.Option(
            "--adapter-from",
            metavar="FOLDER",
            help="Go on with the adapters in a folder of PEFT, or a .safetensors of diffusers or kohya.",
        ),
    ] = None
    save_adapters: Annotated[
        list[str] | None,
        typer.Option(
            "--save-adapters",
            metavar="FORM",
            help="Also write the adapters by themselves, in the folder of the run: apart (an .onnx_adapter beside the model), "
            "inputs, kept, or peft (safetensors); may be given again. The tuned model has them merged.",
        ),
    ] = None

    def settings(self) -> dict[str, Any] | None:
        """Return what ``burnish.surgery.lora`` takes, or None where it has nothing to put beside the layers.

        Raises:
            typer.BadParameter: settings that cannot be read, or that contradict each other.
        """
        self._check()
        if self.adapter is not None:
            numbers = {"rank": self.rank, "alpha": self.alpha}
            chosen = {name: number for name, number in numbers.items() if number is not None}
            return {"variant": self.adapter, **chosen, "patterns": self.lora_layers or None}
        if self.lora is None:
            return None
        return {**_read(self.lora), "patterns": self.lora_layers or None}

    def source(self) -> Mapping[str, Any] | Path | None:
        """Return what ``burnish.finetune`` takes: settings, or the folder of PEFT; None for no adapters."""
        settings = self.settings()
        return self.adapter_from if settings is None else settings

    def put_beside(self, model: Path) -> ir.Model | Path:
        """Return a model with its adapters, or the path itself where none are asked for."""
        from burnish import surgery

        settings = self.settings()
        if settings is not None:
            return surgery.lora(model, **settings)
        return model if self.adapter_from is None else surgery.load_peft(model, self.adapter_from)

    def _check(self) -> None:
        from burnish.settings import suggestion

        ways = [name for name in ("adapter", "lora", "adapter_from") if getattr(self, name) is not None]
        if len(ways) > 1:
            first, second = (f"--{name.replace('_', '-')}" for name in ways[:2])
            raise typer.BadParameter(f"{first} and {second} both say which adapters there are: give one of them")
        if self.lora_layers and ways not in (["adapter"], ["lora"]):
            raise typer.BadParameter(
                "--lora-layers says beside which layers adapters stand: give --lora too, such as rank=8, or --adapter lora"
            )
        for name in ("rank", "alpha"):
            if getattr(self, name) is None:
                continue
            if self.adapter is None:
                raise typer.BadParameter(f"--{name} is that of an --adapter: give --adapter lora too")
            if self.adapter == IA3:
                raise typer.BadParameter(f"--{name}: an ia3 scales what a layer gives, and has none: leave it out")
        for form in self.save_adapters or []:
            if form not in FORMS:
                raise typer.BadParameter(f"--save-adapters {form}{suggestion(form, FORMS)}: give {', '.join(FORMS)}")


def _read(text: str) -> dict[str, Any]:
    from burnish.errors import ConfigurationError
    from burnish.settings import read_settings, suggestion

    try:
        _, settings = read_settings("--lora", f"lora:{text}")
    except ConfigurationError as error:
        raise typer.BadParameter(str(error).replace("'lora:", "'")) from error
    for name in settings:
        if name not in SETTINGS:
            known = ", ".join(SETTINGS)
            raise typer.BadParameter(f"--lora has no setting '{name}'{suggestion(name, SETTINGS)}; it has {known}")
    return settings
