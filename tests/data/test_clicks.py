"""Clicks: files in Criteo's format, of which malformed lines are counted and left out, and clicks that are drawn."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from burnish.data import Dataset, Loader, synthetic_clicks
from burnish.errors import ConfigurationError, DataError
from criteo_file import CriteoFile

ROWS = [7, *[100] * 25]


def line(label: str = "1", numbers: tuple[str, ...] = ("3", "", "-2"), categories: tuple[str, ...] = ("68fd1e64", "")) -> str:
    numbers += ("0",) * (13 - len(numbers))
    categories += ("0a",) * (26 - len(categories))
    return "\t".join([label, *numbers, *categories])


def written(folder: Path, *lines: str, end: str = "\n") -> Path:
    path = folder / "day.tsv"
    path.write_bytes(end.join(lines).encode())
    return path


@pytest.mark.parametrize("end", ["\n", "\r\n"], ids=["unix", "windows"])
def test_fields_become_inputs_of_the_model(tmp_path: Path, end: str) -> None:
    data = CriteoFile(written(tmp_path, line(), line("0", numbers=("1",)), line(categories=("7",)), end=end), ROWS)
    assert isinstance(data, Dataset)
    assert (len(data), data.malformed, data.note) == (3, 0, None)
    batch = data.batch(np.array([2, 0]))
    assert [*batch] == ["numbers", *(f"category_{place}" for place in range(1, 27)), "targets"]
    assert {name: array.dtype.name for name, array in batch.items()} == {
        name: "int64" if name.startswith("category") else "float32" for name in batch
    }
    np.testing.assert_allclose(batch["numbers"][1, :4], [np.log(4.0), 0, 0, 0], rtol=1e-6)
    np.testing.assert_array_equal(batch["category_1"], [0, 0x68FD1E64 % 7])
    np.testing.assert_array_equal(batch["category_2"], [10, 0])
    np.testing.assert_array_equal(batch["targets"], [[1], [1]])
    np.testing.assert_array_equal(data.batch(np.array([1]))["targets"], [[0]])


BROKEN = {
    "too few fields": line().rpartition("\t")[0],
    "too many fields": line() + "\t0a",
    "no label": line(""),
    "another label": line("2"),
    "no number": line(numbers=("3.5",)),
    "a sign alone": line(numbers=("-",)),
    "no category": line(categories=("xyz",)),
    "nothing": "",
}


@pytest.mark.parametrize("broken", BROKEN.values(), ids=BROKEN)
def test_malformed_lines_are_counted_named_and_left_out(tmp_path: Path, broken: str) -> None:
    data = CriteoFile(written(tmp_path, line("0"), broken, line("1"), broken, line("1")), ROWS)
    assert (len(data), data.malformed) == (3, 2)
    assert data.note == f"{tmp_path / 'day.tsv'}: 2 of 5 lines are malformed and left out: 2, 4"
    np.testing.assert_array_equal(data.batch(np.arange(3))["targets"], [[0], [1], [1]])


def test_many_malformed_lines_are_not_all_named(tmp_path: Path) -> None:
    data = CriteoFile(written(tmp_path, *["?"] * 5, line()), ROWS)
    assert data.note is not None
    assert data.note.endswith("5 of 6 lines are malformed and left out: 1, 2, 3 and 2 more")


def test_a_loader_shuffles_the_lines_of_a_file(tmp_path: Path) -> None:
    data = CriteoFile(written(tmp_path, *(line(numbers=(str(number),)) for number in range(32))), ROWS)
    orders = [np.concatenate([batch["numbers"][:, 0] for batch in Loader(data, 8, seed=seed).epoch(0)]) for seed in (3, 3, 4)]
    np.testing.assert_array_equal(orders[0], orders[1])
    assert (orders[0] != orders[2]).any()
    np.testing.assert_allclose(np.sort(orders[0]), np.log1p(np.arange(32)), rtol=1e-6)


def test_files_that_are_none(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="none of its 2 lines is a label, 13 whole numbers and 26 hexadecimal categories"):
        CriteoFile(written(tmp_path, "a,b", "1,2"), ROWS)
    with pytest.raises(DataError, match=r"nowhere\.tsv: No such file"):
        CriteoFile(tmp_path / "nowhere.tsv", ROWS)
    with pytest.raises(ConfigurationError, match="CriteoFile: rows must be a whole number of at least 1, or 26 of them, not"):
        CriteoFile(written(tmp_path, line()), [3, 4])


def test_drawn_categories_follow_zipfs_law() -> None:
    data = synthetic_clicks(100_000, [50, 3], numbers=2, exponent=1.0, seed=5)
    counts = np.bincount(data.arrays["category_1"], minlength=50)
    expected = 100_000 / np.arange(1, 51) / (1 / np.arange(1, 51)).sum()
    np.testing.assert_allclose(counts, expected, atol=5 * np.sqrt(expected.max()))
    assert data.arrays["category_2"].max() == 2


def test_draws_share_what_is_to_be_learned() -> None:
    first, again, second = (synthetic_clicks(5000, [4], numbers=2, seed=1, draw=draw) for draw in (0, 0, 1))
    for name, array in first.arrays.items():
        np.testing.assert_array_equal(array, again.arrays[name])
    assert (first.arrays["numbers"] != second.arrays["numbers"]).all()
    rates = [[data.arrays["targets"][data.arrays["category_1"] == row].mean() for row in range(4)] for data in (first, second)]
    np.testing.assert_allclose(*rates, atol=0.1)
    assert max(rates[0]) - min(rates[0]) > 0.2


@pytest.mark.parametrize(
    "options", [{"rows": []}, {"rows": [0]}, {"rows": [2], "exponent": -1}, {"rows": [2], "samples": 0}], ids=str
)
def test_draws_of_sizes_that_do_not_fit(options: dict[str, object]) -> None:
    with pytest.raises(ConfigurationError, match="synthetic_clicks: "):
        synthetic_clicks(**{"samples": 3, **options})
