"""``burnish quantize``: a model that trains as it will compute with integers."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, ClassVar

import typer

from burnish.cli.compilation_options import SampleAxisOption
from burnish.cli.console import counted, output
from burnish.cli.data_options import Pixels, TextOptions
from burnish.cli.option_groups import OptionGroup, takes_options, values_of
from burnish.cli.predict import DATA, RESULT, ImageSizeOption
from burnish.compiler.options import CompileOptions
from burnish.files.file_writing import check_output

BATCH = 32
NONE = "none"


@dataclass(frozen=True)
class Integers(OptionGroup):
    """What weights and activations become."""

    panel: ClassVar = "Integers"
    weights: Annotated[
        str,
        typer.Option("--weights", metavar="FORMAT", help="int8, int8 per channel, int4, int4 per channel or int4 blocks of 32."),
    ] = "int8 per channel"
    activations: Annotated[
        str, typer.Option("--activations", metavar="FORMAT", help="uint8, int8, or none for weights alone.")
    ] = "uint8"
    method: Annotated[
        str, typer.Option("--method", help="How far the range of activations goes: minmax, percentile or entropy.")
    ] = "minmax"
    scales: Annotated[
        str, typer.Option("--scales", help="learned by gradients, observed from the data of training, or fixed.")
    ] = "learned"
    freeze_observers_after: Annotated[
        str | None,
        typer.Option(
            "--freeze-observers-after",
            metavar="WHEN",
            help="When observed ranges stay: a number of steps; '2 epochs'; or settled, each as soon as it moved by no more than "
            "1 % of its width over some hundred steps (settled:0.005: 0.5 %).",
        ),
    ] = None
    skip: Annotated[
        list[str] | None, typer.Option("--skip", metavar="PATTERN", help="Layers that stay in float32; any number of times.")
    ] = None
    first_and_last: Annotated[
        str | None,
        typer.Option("--first-and-last", metavar="FORMAT", help="int8 or float32 for the first and the last layer."),
    ] = None
    reduce_range: Annotated[
        bool,
        typer.Option(
            "--reduce-range/--full-range", help="Use 7 of 8 bits for weights, for x86 processors without VNNI, or all of them."
        ),
    ] = True


@takes_options()
def quantize(
    model: Annotated[Path, typer.Argument(metavar="MODEL", help="An ONNX file in float32.", show_default=False)],
    *,
    path: Annotated[
        Path,
        typer.Option("--output", "-o", help="The ONNX file to write, to be trained.", show_default=False, rich_help_panel=RESULT),
    ],
    data: Annotated[
        str | None,
        typer.Option("--data", help="What the ranges of activations are measured on, as predict takes it.", rich_help_panel=DATA),
    ] = None,
    label: Annotated[str | None, typer.Option("--label", help="Column of a table to leave out.", rich_help_panel=DATA)] = None,
    image_size: ImageSizeOption = None,
    samples: Annotated[
        int, typer.Option("--samples", min=1, help="How many of the data are read at most.", rich_help_panel=DATA)
    ] = 256,
    sample_axis: SampleAxisOption = None,
    pixels: Pixels,
    texts: TextOptions,
    integers: Integers,
) -> None:
    """Let a model train as it will compute with integers: writes a file for train, whose export then holds them."""
    from burnish import surgery
    from burnish.data.unlabelled import open_samples
    from burnish.files.export import save_inference
    from burnish.finetuning.quantization import calibration_batches
    from burnish.quantization.quantize import remaining_line
    from burnish.sample_axes import ask_sample_axes
    from burnish.training.trained_model import open_model

    activations = None if integers.activations == NONE else integers.activations
    if path.suffix != ".onnx":
        raise typer.BadParameter(f"--output {path}: a model is written as .onnx")
    check_output(path, "--output", read=[model, data])
    if activations is not None and data is None:
        raise typer.BadParameter(
            "the ranges of activations are measured on data: give --data, or --activations none for weights alone"
        )
    if activations is None and data is not None:
        raise typer.BadParameter("--data is for the ranges of activations, and --activations none leaves them: leave it out")
    calibration, read, axes = None, 0, values_of(CompileOptions, sample_axis=sample_axis).get("sample_axis")
    if data is not None:
        opened = open_model(model, sample_axis=axes, to_evaluate=False)
        text = texts.settings_for(model, data, opened.described)
        found = open_samples(data, opened.to_predict, label=label, image_size=image_size, pixels=pixels.settings(), text=text)
        size = opened.fixed_batch("predict") or BATCH
        calibration, read = calibration_batches(found.dataset, samples, size, opened.to_predict.axes)
    chosen: dict[str, Any] = {
        name: getattr(integers, name)
        for name in ("weights", "method", "scales", "freeze_observers_after", "first_and_last", "reduce_range")
    }
    quantized = surgery.quantize(model, activations=activations, calibration=calibration, skip=integers.skip or (), **chosen)
    ask_sample_axes(quantized.graph, axes)
    save_inference(quantized, path)
    remaining = remaining_line(quantized)
    count = sum(node.op_type == "QuantizeLinear" for node in quantized.graph)
    measured = f", calibrated on {counted(read, 'sample')} of {data}" if read else ""
    output().print(f"{path}: {counted(count, 'quantization')}{measured}; burnish train {path} trains it, and exports integers")
    if remaining is not None:
        output().print(f"{path}: {remaining}")
