"""What every test may rely on, and which cases of a product of parameters ``make test`` and ``make test-all`` run."""

import gc
import signal
import sys
from collections import Counter, defaultdict
from collections.abc import Generator
from itertools import combinations

import pytest
from hypothesis import HealthCheck, settings

from oracles.exporter_registry import REGISTRATION, keep_registry

# How long a draw takes says how busy the machine is, and nothing of the code.
settings.register_profile("burnish", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("burnish")

# A shell starts its background jobs deaf to Ctrl-C, and their children inherit that; the tests of interrupts send one.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Spare the tests a walk of the garbage collector over all that collecting them leaves: modules and test items."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.collect()
        gc.freeze()
        gc.enable()


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup() -> None:
    if REGISTRATION in sys.modules:
        keep_registry()


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave of a product with the mark ``each_value`` the cases in which each pair of values stands.

    Those of them whose values all stand in others are marked as slow. So are those of a function with the mark ``quick_cases``,
    but for as many as it says, which are spread evenly over all; with ``slow_cases`` the others are left to the campaign.
    """
    tables = defaultdict(list)
    for item in items:
        function = item.nodeid.partition("[")[0]
        if item.get_closest_marker("each_value") and hasattr(item, "callspec"):
            tables[function].append(item)
    _leave_to(items, "slow_cases", pytest.mark.campaign)
    _leave_to(items, "quick_cases", pytest.mark.slow)
    repeated = set()
    for cases in tables.values():
        values = [_values(item) for item in cases]
        chosen = _covering(values)
        of_pairs = chosen | _covering_pairs(values, chosen)
        repeated.update(item for index, item in enumerate(cases) if index not in of_pairs)
        for index in of_pairs - chosen:
            cases[index].add_marker(pytest.mark.slow)
    if repeated:
        items[:] = [item for item in items if item not in repeated]
        config.hook.pytest_deselected(items=list(repeated))


def _leave_to(items: list[pytest.Item], mark: str, later: pytest.MarkDecorator) -> None:
    """Give the later mark to all cases of functions with a mark, but for as many as that says."""
    series = defaultdict(list)
    for item in items:
        if item.get_closest_marker(mark):
            series[item.nodeid.partition("[")[0]].append(item)
    for cases in series.values():
        count = cases[0].get_closest_marker(mark).args[0]
        kept = {round(place * (len(cases) - 1) / max(count - 1, 1)) for place in range(count)}
        for index, item in enumerate(cases):
            if index not in kept:
                item.add_marker(later)


def _values(item: pytest.Item) -> list[str]:
    """The values of a case, and those combinations of them that the mark asks for."""
    values = {name: f"{name}: {_identity(value)}" for name, value in item.callspec.params.items()}
    together = [" and ".join(values[name] for name in names) for names in item.get_closest_marker("each_value").args]
    return [*values.values(), *together]


def _identity(value: object) -> object:
    """What tells a value from others; an object that is no plain value may take long to be written out."""
    return repr(value) if isinstance(value, (str, int, float, tuple)) else id(value)


def _covering(cases: list[list[str]]) -> set[int]:
    """Indices of cases in which every value stands: of those that bring the most new values, the one of the newest pairs."""
    uncovered, pairs, chosen = set().union(*cases), Counter(), set()

    def merit(index: int) -> tuple[int, int, int]:
        met = [pairs[pair] for pair in combinations(cases[index], 2)]
        return len(uncovered.intersection(cases[index])), met.count(0), -sum(met)

    left = list(range(len(cases)))
    while left := [index for index in left if not uncovered.isdisjoint(cases[index])]:
        best = max(left, key=merit)
        uncovered.difference_update(cases[best])
        pairs.update(combinations(cases[best], 2))
        chosen.add(best)
    return chosen


def _covering_pairs(cases: list[list[str]], chosen: set[int]) -> set[int]:
    """Indices of the cases that bring, beside those that are chosen, each pair of values: of those left the one of the most."""
    pairs = [set(combinations(values, 2)) for values in cases]
    uncovered = set().union(*pairs).difference(*(pairs[index] for index in chosen))
    further = set()
    while uncovered:
        best = max(range(len(cases)), key=lambda index: len(pairs[index] & uncovered))
        uncovered -= pairs[best]
        further.add(best)
    return further


@pytest.fixture
def frequent_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let an epoch of a few steps have the rows of a long one in ``metrics.csv``."""
    monkeypatch.setattr("burnish.training.trainer.STEPS_PER_ROW", 1)
