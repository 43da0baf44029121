"""A row of the table of steps: its contenders, opened, held to equal losses, and stepped in rounds that are interleaved."""

from __future__ import annotations

import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import compare
import data_parallel
import environments
import installation
from compare import Entrant
from contender_kinds import PAGES
from contenders import ContenderError
from table_plan import Place, Schedule
from workloads import WORKLOADS, ClicksWorkload, prepare

PRECISION = "float32"
TURN_SECONDS = 0.3
ENGINES = ("standard", "kernels", "torch")
PEERS = ("tuned+pages", "tuned", "compile", "onnxruntime-training")
REFERENCES = {1: compare.REFERENCE, 2: "ddp"}
OURS = data_parallel.OURS
LOCAL = {"parallel": {"norm": "local"}}
ENGINE_SETTINGS: Mapping[str, Mapping[str, Any]] = {
    "standard": {"engine": "onnxruntime", "kernels": False},
    "kernels": {"engine": "onnxruntime", "kernels": True},
    "torch": {"engine": "torch"},
}
TEAMS = {
    "ddp": data_parallel.KINDS["ddp"],
    "ddp" + PAGES: data_parallel.KINDS["ddp" + PAGES],
    **{
        f"burnish-{name}": data_parallel.Kind(compare.KINDS[f"burnish-{name}"].title, OURS, {**settings, **LOCAL})
        for name, settings in ENGINE_SETTINGS.items()
    },
}


@dataclass(frozen=True)
class Choice:
    """Which contenders a run has, and how.

    Attributes:
        engines: of burnish, out of ``ENGINES``.
        peers: beside PyTorch eager (or DDP), out of ``PEERS``.
        compiled: the batches that ``torch.compile`` takes part in; it takes a minute for a first step.
        threads: of one process; workers share them.
        turn_seconds: how long a turn is at the least.
    """

    engines: Sequence[str] = ENGINES
    peers: Sequence[str] = PEERS
    compiled: Sequence[int] = (16, 1)
    threads: int = 2
    turn_seconds: float = TURN_SECONDS


def contenders_of(place: Place, choice: Choice) -> list[str]:
    """The names of a row's contenders, in the order in which memory is given to them."""
    if place.workers > 1:
        pages = ["ddp" + PAGES] if "tuned+pages" in choice.peers else []
        return [REFERENCES[2], *(f"burnish-{engine}" for engine in choice.engines), *pages]
    workload = WORKLOADS[place.model]
    tuned = "channels_last" if workload.images else "sparse" if isinstance(workload, ClicksWorkload) else "fused"
    by_rows = "-sparse" if tuned == "sparse" else ""
    names = {"tuned": tuned, "tuned" + PAGES: tuned + PAGES}
    peers = [name for name in choice.peers if name != "compile" or place.batch in choice.compiled]
    ours = [f"burnish-{engine}{by_rows}" for engine in choice.engines]
    return [REFERENCES[1], *ours, *(names.get(name, name) for name in peers)]


def measure(place: Place, choice: Choice, schedule: Schedule, ahead: Sequence[Place]) -> dict[str, Any]:
    """Measure a row; returns what was measured, JSON-compatible.

    Args:
        place: which row.
        choice: of its contenders.
        schedule: how long its rounds go on; it is told what the row took.
        ahead: the rows after it.
    """
    began, end = schedule.now(), schedule.end_of_rounds(place, ahead)
    names = contenders_of(place, choice)
    with tempfile.TemporaryDirectory() as path:
        folder = Path(path)
        job = prepare(folder, place.model, place.total)
        with (_teams if place.workers > 1 else _processes)(place, names, choice, job, folder) as opened:
            stepping = schedule.now()
            done = 0
            while schedule.goes_on(done, end):
                opened.take_round(choice.turn_seconds)
                done += 1
            schedule.note(place, stepping - began, done, schedule.now() - stepping)
            opened.finish()
    described = compare.described(opened.entrants(), place.model, place.total, None, PRECISION, choice.threads, done)
    return described | {"workers": place.workers, "batch": place.batch, "total": place.total}


def _tell(entrant: Entrant) -> None:
    """Say that a contender stands ready, or why not: opening all of them takes a while."""
    print(f"  {entrant.name}: {entrant.row.get('refused', 'ready')}", file=sys.stderr, flush=True)


@dataclass
class _Processes:
    """Contenders that are a process each."""

    started: list[Entrant]

    def take_round(self, turn_seconds: float) -> None:
        compare.take_round(self.started, turn_seconds, None)

    def finish(self) -> None:
        compare.finish(self.started)

    def entrants(self) -> list[Entrant]:
        return self.started


@contextmanager
def _processes(place: Place, names: Sequence[str], choice: Choice, job: Mapping[str, Any], folder: Path) -> Iterator[_Processes]:
    # They import what they need at the same time, and do the rest one after the other.
    job = {**job, "threads": choice.threads}
    opened = _Processes([compare.start(name, job, folder, PRECISION) for name in names])
    try:
        for number, entrant in enumerate(opened.started):
            if entrant.contender is not None and (refusal := compare.no_memory_beside(opened.started[:number])):
                entrant.give_up(refusal)
            compare.take_first_steps(entrant)
            compare.check_losses(entrant, opened.started[0], compare.TOLERANCES[PRECISION])
            _tell(entrant)
        yield opened
    finally:
        for entrant in opened.started:
            if entrant.contender is not None:
                entrant.contender.kill()


@dataclass
class _Teams:
    """Contenders that are several workers each, with what is known of each."""

    rows: dict[str, Entrant] = field(default_factory=dict)
    teams: dict[str, data_parallel.Team] = field(default_factory=dict)

    def enter(self, name: str, start: Callable[[], data_parallel.Team], reference: str) -> None:
        """Start a contender, and take the first steps, unless memory or its losses speak against it."""
        entrant = self.rows[name] = Entrant(name, {"name": name, "title": TEAMS[name].title})
        if name.endswith(PAGES) and environments.keeping_pages() is None:
            entrant.give_up("no allocator that keeps pages was found")
            return
        if refusal := compare.no_memory_for(max((sum(team.peak_bytes()) for team in self.teams.values()), default=0)):
            entrant.give_up(refusal)
            return
        try:
            team = self.teams[name] = start()
            first = team.step()
            for _ in range(compare.CHECKED_STEPS - 1):
                team.step()
        except ContenderError as error:
            self._give_up(name, str(error))
            return
        told = installation.without_folders(team.told)
        entrant.row |= {"first_step_seconds": team.build_seconds + first, "losses": team.losses, **told}
        if reference not in self.teams:
            self._give_up(name, f"there are no losses to compare with: {reference} failed")
        elif wrong := compare.disagreement(team.losses, self.teams[reference].losses, compare.TOLERANCES[PRECISION]):
            self._give_up(name, f"{wrong}: {compare.DISAGREES}")

    def _give_up(self, name: str, reason: str) -> None:
        self.rows[name].give_up(reason)
        if name in self.teams:
            self.teams.pop(name).kill()

    def take_round(self, turn_seconds: float) -> None:
        for name in list(self.teams):
            time.sleep(compare.REST)
            try:
                first = self.teams[name].run(1)
                steps = first + self.teams[name].run(max(0, round(turn_seconds / first[0]) - 1))
            except ContenderError as error:
                self._give_up(name, str(error))
                continue
            self.rows[name].steps += steps
            self.rows[name].turns.append(statistics.fmean(steps))

    def finish(self) -> None:
        for name in list(self.teams):
            try:
                self.rows[name].row["peak_bytes"] = max(self.teams[name].peak_bytes())
            except ContenderError as error:
                self._give_up(name, str(error))

    def entrants(self) -> list[Entrant]:
        return list(self.rows.values())


@contextmanager
def _teams(place: Place, names: Sequence[str], choice: Choice, job: Mapping[str, Any], folder: Path) -> Iterator[_Teams]:
    job = {**job, "threads": max(1, choice.threads // place.workers)}
    if isinstance(workload := WORKLOADS[place.model], ClicksWorkload):
        job |= {"sparse": True, "fused": False}
    job |= {"channels_last": workload.images}
    opened = _Teams()
    try:
        for name in names:
            opened.enter(name, partial(data_parallel.start_team, name, TEAMS[name], place.workers, job, folder), names[0])
            _tell(opened.rows[name])
        yield opened
    finally:
        for team in opened.teams.values():
            team.kill()
