"""What a person sees of a run."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from burnish.training import progress
from burnish.training.progress import Bar, Lines, Reached, duration, epoch_line, figures


def reached(step: int, epoch: int = 1) -> Reached:
    return Reached(epoch, 12, step, 120, 32 * step, {"loss": 0.25, "accuracy": 0.5})


@pytest.fixture
def clock(monkeypatch):
    """A clock that stands still until it is told otherwise."""
    now = [100.0]
    monkeypatch.setattr(progress.time, "monotonic", lambda: now[0])
    return now


def test_speed_and_time_left_leave_out_the_first_step(clock, capsys):
    lines = Lines()
    lines.start(0, 120)
    clock[0] = 150.0
    lines.step(reached(1))
    capsys.readouterr()
    clock[0] = 170.0
    lines.step(reached(10))
    capsys.readouterr()
    lines.step(reached(11))
    lines.epoch(reached(11), {"loss": 0.125})
    assert capsys.readouterr().out == (
        "epoch  1/12  train loss 0.2500 accuracy 0.5000  evaluation loss 0.1250  16 samples/s, 3:38 left\n"
    )


def test_a_long_epoch_has_lines_within(clock, capsys):
    lines = Lines()
    lines.start(0, 120)
    lines.step(reached(1))
    clock[0] = 159.0
    lines.step(reached(60))
    assert capsys.readouterr().out == ""
    clock[0] = 160.0
    lines.step(reached(61))
    lines.step(reached(62))
    assert capsys.readouterr().out == "epoch 1/12, step 61 of 120  loss 0.2500 accuracy 0.5000  32 samples/s, 59 s left\n"
    lines.note("a note")
    assert capsys.readouterr().out == "a note\n"
    lines.close()


def test_the_bar_shows_the_figures_and_keeps_a_line_per_epoch():
    bar = Bar()
    written = io.StringIO()
    bar._bar.live.console = Console(file=written, force_terminal=True, width=120)
    bar.start(0, 120)
    for step in range(1, 11):
        bar.step(reached(step))
    bar._bar.refresh()
    bar.epoch(reached(10), {})
    bar.note("[not markup]")
    bar.close()
    text = written.getvalue()
    assert "epoch 1/12" in text
    assert "samples/s" in text
    assert "epoch  1/12  train loss 0.2500 accuracy 0.5000\n" in text
    assert "[not markup]\n" in text


@pytest.mark.parametrize(("terminal", "kind"), [(True, Bar), (False, Lines)])
def test_a_bar_on_a_terminal_and_lines_elsewhere(monkeypatch, terminal, kind):
    monkeypatch.setattr(progress.sys.stdout, "isatty", lambda: terminal, raising=False)
    assert type(progress.automatic()) is kind


@pytest.mark.parametrize(("seconds", "text"), [(0.4, "0 s"), (59.4, "59 s"), (59.6, "1:00"), (125, "2:05"), (3725, "1:02:05")])
def test_durations(seconds, text):
    assert duration(seconds) == text


def test_figures():
    assert figures({"loss": 1.23456, "accuracy": 1.0}) == "loss 1.2346 accuracy 1.0000"
    assert epoch_line(reached(10, epoch=10), {}) == "epoch 10/12  train loss 0.2500 accuracy 0.5000"
