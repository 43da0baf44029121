"""The callback that writes the report of a run when it ends."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from burnish.errors import NonFiniteLossError
from burnish.training.callbacks.base import Callback, Run
from burnish.training.environment import environment, peak_resident_bytes, session_line
from burnish.training.html_report.contents import Contents, with_stages
from burnish.training.html_report.page import write_report
from burnish.training.html_report.samples import judge, judged_samples
from burnish.training.run_files import AVERAGE
from burnish.training.run_results import TrainingInterrupted
from burnish.training.trained_model import model_of_session


class HtmlReport(Callback):
    """Write a report as one HTML file when the run ends, also after Ctrl-C or a non-finite loss.

    It shows curves, rates, the confusion matrix and the worst examples of the evaluation data (or of the training data if there
    are none), the trained tensors, the configuration, the environment, time and memory.

    Args:
        path: path of the file, by convention ``.html``.
        title: title of the page; by default the name of the run folder.
        parameters: ``average`` evaluates the averaged weights of the optimizer instead of the parameters.
        configuration, command: configuration file that repeats the run, and its command line, to show.
        stages: folders of the earlier runs that this one continues, in order; their curves and counts are included.

    Attributes:
        best: the exported epoch, as from ``exported_epoch``; None: the best of the run.
        judged: the evaluated state, in words.
    """

    def __init__(
        self,
        path: str | Path,
        title: str | None = None,
        *,
        parameters: str | None = None,
        configuration: str | None = None,
        command: str | None = None,
        stages: Sequence[Path] = (),
    ):
        self.path, self.title, self.parameters = Path(path), title, parameters
        self.configuration, self.command, self.stages = configuration, command, tuple(stages)
        self.best: Mapping[str, Any] | None = None
        self.judged = "the state at the end of the run"

    def on_run_end(self, run: Run, error: BaseException | None) -> None:
        if not (error is None or isinstance(error, NonFiniteLossError | TrainingInterrupted)):
            return
        loader = run.eval_loader or run.loader
        model = model_of_session("the run", run.session, self.parameters == AVERAGE)
        is_evaluated = run.eval_loader is not None
        rows, best = with_stages(self.stages, run.rows, self.best or run.best_epoch)
        contents = Contents(
            title=self.title or run.run_directory.name,
            rows=rows,
            program=run.program,
            batch_size=max(run.loader.batch_size, 1),
            best=best,
            stopped=str(error) if error is not None else run.stop_reason,
            # With tables split over workers, all of them would have to predict.
            judgement=None if run.session.evaluates_together else judge(model, judged_samples(loader), run.loader.batch_size),
            data=f"the {'evaluation' if is_evaluated else 'training'} data, by {self.judged}",
            configuration=self.configuration,
            command=self.command,
            environment={**environment(), "engine": session_line(run.session.describe())},
            peak_bytes=peak_resident_bytes(),
        )
        write_report(self.path, contents)
        run.note(f"{self.path}: the report of the run")
