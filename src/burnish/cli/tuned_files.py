"""What ``burnish finetune`` does with files that it has tuned: makes integers of them, and says how good what they give is."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from burnish.cli.console import output
from burnish.cli.pixel_options import Pixels
from burnish.cli.text_options import TextOptions
from burnish.cli.train_options import Course, Data
from burnish.files.file_writing import write_text

if TYPE_CHECKING:
    from burnish.data import Dataset

OBJECTS = "objects"
TUNED, QUANTIZED, ACCURACIES, CURVES = "tuned.onnx", "quantized.onnx", "quantization.json", "curves.png"
"""In folders of runs: the tuned model, its quantized form before it is trained as such, the accuracies, and the curves."""


@dataclass(frozen=True)
class QuantizedStage:
    """The stage in which a tuned model trains as it will compute with integers.

    Attributes:
        folder: of the run.
        earlier: of the stage that tuned the model.
        choices: of the run.
        data, pixels, texts, course: of the command.
    """

    folder: Path
    earlier: Path
    choices: Mapping[str, Any]
    data: Data
    pixels: Pixels
    texts: TextOptions
    course: Course

    @property
    def start(self) -> Path:
        """The quantized model that the stage begins with."""
        return self.folder / QUANTIZED

    @property
    def tuned(self) -> Path:
        """The tuned model in float32."""
        return self.earlier / TUNED

    @property
    def loss(self) -> Any:
        """What the quantized model learns, as settings: for classes, what the tuned model says of them beside the labels."""
        from burnish import losses
        from burnish.training.finetuning import Quantization

        integers = Quantization.read(self.choices["quantize"])
        return integers.objective(losses.get(self.choices["loss"]), self.tuned, self.choices["outputs"]).options()

    def begun(self, is_resumed: bool) -> QuantizedStage:
        """Write the quantized model, calibrated on the training data, and say so; that of a run that goes on stays.

        Returns:
            The stage itself.
        """
        from burnish.files.model_file import save_model
        from burnish.quantization.quantize import remaining_line
        from burnish.training.finetuning import Quantization

        if is_resumed and self.start.is_file():
            return self
        integers = Quantization.read(self.choices["quantize"])
        dataset = self._opened(self.data.data)
        chosen = self.choices["outputs"], self.choices["batch_size"], self.course.chosen_engine()
        model = integers.applied(self.tuned, dataset, *chosen)
        save_model(model, self.start)
        count = sum(node.op_type == "QuantizeLinear" for node in model.graph)
        weights = integers.options["weights"]
        output().print(f"{self.start}: {weights}, {count} quantizations, calibrated on {self.data.data}")
        if (remaining := remaining_line(model)) is not None:
            output().print(f"{self.start}: {remaining}")
        return self

    def end(self, written: Path) -> None:
        """Print and write the accuracies: on the evaluation data, where there are some."""
        from burnish.training.finetuning import accuracies_line, figure_of

        which = "training" if self.data.eval_data is None else "evaluation"
        dataset, engine = self._opened(self.data.eval_data or self.data.data), self.course.chosen_engine()
        metric = self.choices["metrics"][0]
        files = {"float32": self.tuned, "quantized_after_training": self.start, "quantized_in_training": written}
        accuracies = {name: figure_of(path, metric, dataset, self.course.batch_size, engine) for name, path in files.items()}
        content = json.dumps({"data": which, "metric": metric, **accuracies}, indent=1) + "\n"
        write_text(self.folder / ACCURACIES, content)
        output().print(accuracies_line(accuracies, metric, which))

    def _opened(self, source: str) -> Dataset:
        return _opened(self.tuned, source, self.data, self.pixels, self.texts)


def say_precision(tuned: Path, data: Data, pixels: Pixels, texts: TextOptions, course: Course) -> None:
    """Print how precise a detector's file is by the boxes that it leaves itself, where there are evaluation data."""
    from burnish.training.finetuning import file_line

    if data.eval_data is None:
        return
    dataset = _opened(tuned, data.eval_data, data, pixels, texts)
    line = file_line(tuned, dataset, course.batch_size, "evaluation", course.chosen_engine())
    if line is not None:
        output().print(line)


def _opened(tuned: Path, source: str, data: Data, pixels: Pixels, texts: TextOptions) -> Dataset:
    """Data as a tuned model reads them, which says what was done to pixels and texts."""
    from burnish.data import open_dataset
    from burnish.training.trained_model import open_model

    opened = open_model(tuned)
    described = opened.described
    return open_dataset(
        source,
        opened.to_evaluate,
        label=data.label,
        classes=described.classes,
        image_size=data.image_size,
        pixels=pixels.settings() if described.preprocessing is None else None,
        text=texts.settings_for(tuned, source, described),
        missing=data.missing,
    )
