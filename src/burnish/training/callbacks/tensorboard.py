"""TensorBoard's event files: figures, rates, speed and memory, histograms of weights and gradients, pictures of examples."""

from __future__ import annotations

from collections.abc import Mapping
from html import escape
from pathlib import Path
from typing import Any

import numpy as np

from burnish.engines.base import LoadedModel
from burnish.errors import ConfigurationError, escaped
from burnish.installing import install_command
from burnish.program import Role
from burnish.settings import is_whole
from burnish.training.callbacks.base import Callback, EpochReport, Run, StepReport
from burnish.training.callbacks.loggers import Speed, option_text, options_of
from burnish.training.environment import resident_bytes
from burnish.training.html_report.pictures import missing_pillow, png
from burnish.training.html_report.samples import judge, judged_samples
from burnish.training.inputs import BatchCheck
from burnish.training.run_files import AVERAGE
from burnish.training.session import Session
from burnish.training.trained_model import model_of_session

GRAY, RED_GREEN_BLUE = 1, 3
"""TensorBoard's numbers of colour spaces (tensorboard/compat/proto/summary.proto, Summary.Image)."""


class TensorBoard(Callback):
    """Writes event files that TensorBoard shows: ``tensorboard --logdir FOLDER``. It needs tensorboardX.

    Scalars: ``train/<figure>`` and ``learning_rate`` of steps, ``evaluation/<figure>`` of epochs, ``speed/samples_per_second``,
    ``memory/resident_bytes``, and ``memory/planned_step_bytes`` once. Histograms after each epoch: ``weights/<name>``, and
    ``gradients/<name>`` of its last batch. Images: the worst examples of the evaluation data; a text says what the model takes
    them for. A text ``configuration`` holds what the run was started with.

    Of several workers the first writes, and scalars alone.

    Args:
        folder: where the files are written; a run that resumes adds another.
        every: write the figures of so many steps together, as their average.
        histograms: how often, in epochs; 0 for none. Gradients are computed once more for it, with the memory of another step.
        examples: how many of the worst examples are shown after each epoch; 0 for none.
        parameters: ``average`` shows examples of the average of the weights that the optimizer keeps.

    Raises:
        ConfigurationError: tensorboardX is not installed, or a number is out of range.
    """

    def __init__(
        self, folder: str | Path, *, every: int = 10, histograms: int = 1, examples: int = 8, parameters: str | None = None
    ):
        for name, value, least in (("every", every, 1), ("histograms", histograms, 0), ("examples", examples, 0)):
            if not is_whole(value) or value < least:
                raise ConfigurationError(f"{name}={value!r}: give a whole number of {least} or more")
        self.package()
        self.folder, self.every, self.histograms, self.examples = Path(folder), every, histograms, examples
        self.parameters = parameters
        self._writer: Any = None
        self._speed = Speed(every)
        self._last_batch: Mapping[str, Any] = {}
        self._gradients: Gradients | None = None

    @staticmethod
    def package() -> Any:
        """Return the package that it needs.

        Raises:
            ConfigurationError: it is not installed.
        """
        try:
            import tensorboardX
        except ImportError as error:
            raise ConfigurationError(
                f"TensorBoard's event files need tensorboardX, which is not installed: {install_command('tensorboardX')}"
            ) from error
        return tensorboardX

    def on_run_begin(self, run: Run) -> None:
        self._writer = self.package().SummaryWriter(str(self.folder))
        self._gradients = Gradients(run.session)
        step = int(run.rows[-1]["step"] or 0) if run.rows else 0  # of the run: its state may have taken others before
        if run.loader.batch_size:  # that of batches as they come is not known before
            self._writer.add_scalar("memory/planned_step_bytes", run.program.planned_peak(run.loader.batch_size).bytes, step)
        # As a block of code, which Markdown leaves as it is.
        lines = [f"    {name}: {escaped(option_text(value))}" for name, value in options_of(run).items()]
        self._writer.add_text("configuration", "\n".join(lines), step)

    def on_step_end(self, run: Run, report: StepReport) -> None:
        self._last_batch = report.batch
        means = self._speed.add(report)
        if means is None:
            return
        for name, value in means.items():
            self._writer.add_scalar(name, value, report.step)
        self._add_memory(report.step)

    def on_epoch_end(self, run: Run, report: EpochReport) -> None:
        for name, value in report.evaluation.items():
            self._writer.add_scalar(f"evaluation/{name}", value, report.step)
        if run.group.world_size > 1:  # who would have to take part, where workers hold parts of the state
            self._writer.flush()
            return
        if self.histograms and report.epoch % self.histograms == 0:
            self._add_histograms(run, report.step)
        if self.examples:
            self._add_examples(run, report.step)
        self._writer.flush()

    def on_run_end(self, run: Run, error: BaseException | None) -> None:
        if self._writer is None:
            return
        if (rest := self._speed.rest()) is not None:
            step, means = rest
            for name, value in means.items():
                self._writer.add_scalar(name, value, step)
        self._writer.close()

    def _add_memory(self, step: int) -> None:
        if (resident := resident_bytes()) is not None:
            self._writer.add_scalar("memory/resident_bytes", resident, step)

    def _add_histograms(self, run: Run, step: int) -> None:
        state = run.session.state()
        for name, array in state.items():
            if name.startswith("param/"):
                self._add_histogram(f"weights/{name.removeprefix('param/')}", array, step)
        if self._gradients is not None and self._last_batch:
            for name, gradient in self._gradients(self._last_batch, state).items():
                self._add_histogram(f"gradients/{name}", gradient, step)

    def _add_histogram(self, tag: str, array: np.ndarray, step: int) -> None:
        values = array.astype(np.float64).reshape(-1)
        values = values[np.isfinite(values)]
        if values.size:
            self._writer.add_histogram(tag, values, step)

    def _add_examples(self, run: Run, step: int) -> None:
        loader = run.eval_loader or run.loader
        model = model_of_session("the run", run.session, self.parameters == AVERAGE)
        judgement = judge(model, judged_samples(loader), run.loader.batch_size, self.examples)
        if not judgement.worst:
            return
        without_pictures = missing_pillow()
        if without_pictures is not None and any(example.pixels is not None for example in judgement.worst):
            run.note(f"TensorBoard shows no examples: {without_pictures}")
        lines = ["| | sample | said | is | error |", "|---|---|---|---|---|"]
        for rank, example in enumerate(judgement.worst):
            cells = (rank, example.name or example.index, example.said, example.truth, f"{example.error:.4g}")
            lines.append(f"| {' | '.join(_cell(str(cell)) for cell in cells)} |")
            if example.pixels is not None and without_pictures is None:
                self._add_image(f"worst/{rank}", example.pixels, step)
        self._writer.add_text("worst examples", "\n".join(lines), step)

    def _add_image(self, tag: str, pixels: np.ndarray, step: int) -> None:
        from tensorboardX.proto.summary_pb2 import Summary

        height, width = pixels.shape[:2]
        space = GRAY if pixels.ndim == 2 else RED_GREEN_BLUE
        image = Summary.Image(height=height, width=width, colorspace=space, encoded_image_string=png(pixels))
        self._writer.file_writer.add_summary(Summary(value=[Summary.Value(tag=tag, image=image)]), step)


def _cell(text: str) -> str:
    """A text as a cell of a table in Markdown, which TensorBoard renders and cleans of scripts."""
    return escape(escaped(text)).replace("|", "&#124;")


class Gradients:
    """Computes gradients of batches in the present state of a session; the state stays.

    It loads the program's graph ``grad`` when it is first asked, beside the session's own: that takes as much memory as a step.
    """

    def __init__(self, session: Session):
        self._session = session
        self._loaded: LoadedModel | None = None

    def __call__(self, batch: Mapping[str, Any], state: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        """Return the gradient of each parameter that trains, by its name; of a table that is read by rows, none.

        Args:
            batch: as ``Session.step`` takes it.
            state: of the session, as ``Session.state`` returns it.

        Raises:
            InputError: the batch does not fit the program.
            EngineError: the engine cannot compute it.
        """
        program, session = self._session.program, self._session
        signature = program.signature["grad"]
        if self._loaded is None:
            self._loaded = session.engine.load(program.grad)
        inputs = dict(BatchCheck(signature)(batch))
        inputs |= {entry.name: state[entry.name] for entry in signature.inputs if entry.is_state}
        for entry in signature.inputs_of(Role.HYPERPARAMETER):
            inputs[entry.name] = np.asarray(entry.default, entry.numpy_dtype)
        outputs = self._loaded(inputs)
        trained = {f"grad:{name.partition('/')[2]}" for name in program.signature["step"].updates if name.startswith("param/")}
        return {name.removeprefix("grad:"): array for name, array in outputs.items() if name in trained}
