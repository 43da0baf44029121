"""What is read the same way whatever option it stands in."""

from __future__ import annotations

import math

import pytest

from burnish.errors import ConfigurationError
from burnish.registry import Registry
from burnish.settings import is_switched_off, matches_pattern, memory_size, nearest, read_settings, suggestion, with_settings
from burnish.validation import is_number, is_whole


@pytest.mark.parametrize(
    ("text", "name", "settings"),
    [
        ("sgd", "sgd", {}),
        ("huber:delta=0.5,reduction=sum", "huber", {"delta": 0.5, "reduction": "sum"}),
        ("adam: betas=[0.8, 0.9], amsgrad = true", "adam", {"betas": [0.8, 0.9], "amsgrad": True}),
        ("sgd:nesterov=False, momentum=None", "sgd", {"nesterov": False, "momentum": None}),
        ("cross_entropy:weight=null", "cross_entropy", {"weight": None}),
        ("a:b=c=d", "a", {"b": "c=d"}),
    ],
)
def test_settings_behind_a_name(text, name, settings):
    assert read_settings("option", text) == (name, settings)


def test_settings_that_cannot_be_read_are_named():
    with pytest.raises(ConfigurationError, match=r"loss 'huber:0.5': settings are written name=value, .*, not '0.5'"):
        read_settings("loss", "huber:0.5")
    with pytest.raises(ConfigurationError, match="loss 'huber:delta=1,delta=2' gives delta twice: give it once"):
        read_settings("loss", "huber:delta=1,delta=2")


def test_what_counts_as_a_number():
    assert [is_number(value) for value in (1, 0.5, 3e38, True, "1", None, math.nan, math.inf, 1e39, 10**400)] == [
        *[True] * 3,
        *[False] * 7,
    ]
    assert [is_whole(value) for value in (1, 1.0, False)] == [True, False, False]


def test_patterns_and_what_comes_near():
    assert matches_pattern("layer1.weight", "layer1*")
    assert matches_pattern("w[0]", "w[0]")
    assert not matches_pattern("Layer1", "layer1")
    assert nearest("stem.wieght", ["head.bias", "stem.weight"]) == "'stem.weight'"
    assert nearest("zzz", ["a", "b", "c", "d"]) == "'a', 'b', 'c'"
    assert suggestion("adma", ["adam", "sgd"]) == " (did you mean 'adam'?)"
    assert suggestion("zzz", ["adam", "sgd"]) == ""
    assert suggestion("adam" * 10**7, ["adam", "sgd"]) == ""  # at once


@pytest.mark.parametrize(
    ("text", "settings"),
    [
        ("power:3", {"rate": 3}),
        ("power: .5, power = 2", {"rate": 0.5, "power": 2}),
        ("power:power=2,rate=inf", {"power": 2, "rate": float("inf")}),
        ("power:fast", {"rate": "fast"}),
        ("power:[1,2]", {"rate": [1, 2]}),
    ],
)
def test_the_first_setting_may_stand_without_its_name(text, settings):
    assert NUMBERS.read(text) == ("power", settings)


def test_what_is_asked_for_by_text_by_options_or_as_an_object():
    assert NUMBERS.resolve("power:3,power=2") == NUMBERS.resolve({"name": "power", "rate": 3, "power": 2}) == 12
    assert NUMBERS.resolve("nothing") == 0
    assert NUMBERS.resolve(7) == 7
    assert NUMBERS.resolve("of:3") == 3
    assert list(NUMBERS.takes("power")) == ["rate", "power"]


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("powr", r"there is no number 'powr' \(did you mean 'power'\?\); choose among nothing, power$"),
        ("power:1,2", "number 'power:1,2': settings are written name=value, with commas between, not '2'"),
        ("power:1,rate=2", "number 'power:1,rate=2' gives rate twice: give it once"),
        ("power:", "number 'power:': no settings stand after the colon: give some, or leave the colon out"),
        ("power", "number 'power' needs the option 'rate': give it"),
        ("nothing:1", "number 'nothing' has no option '1'; it takes none"),
        ({"rate": 1}, "the options of a number have a 'name', and these have only 'rate'"),
        ({}, "have only nothing"),
        (0.5, "a number is a name or an object of tests, not 0.5; choose among nothing, power"),
        (int, r"not the class 'int': call it, as in tests.int\(\.\.\.\); choose among"),
    ],
)
def test_what_is_not_there_is_named(given, message):
    with pytest.raises(ConfigurationError, match=message):
        NUMBERS.resolve(given)


def made(rate, *, power=1):
    """What settings are given to, in the tests below."""
    return rate * 2**power


NUMBERS: Registry[float] = Registry(
    "number",
    {"nothing": lambda: 0, "power": made},
    home="tests",
    is_made=lambda given: isinstance(given, int),
    unlisted={"of": lambda number: number},
    bare=True,
)


def test_settings_are_given_by_name():
    assert with_settings("optimizer 'made'", made, {"rate": 3, "power": 2}) == 12
    assert with_settings("mapping", lambda **options: options, {"anything": 1}) == {"anything": 1}


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"rate": 1, "powr": 2}, r"optimizer 'made' has no option 'powr' \(did you mean 'power'\?\); it takes rate, power$"),
        ({"power": 2}, "optimizer 'made' needs the option 'rate': give it"),
        ({"rate": None}, r"optimizer 'made': unsupported operand .*; it was given the options \{'rate': None\}"),
    ],
)
def test_settings_that_do_not_fit_are_named(settings, message):
    with pytest.raises(ConfigurationError, match=message):
        with_settings("optimizer 'made'", made, settings)


def test_a_switch_is_on_or_off(monkeypatch: pytest.MonkeyPatch) -> None:
    for text, is_off in (("", False), ("on", False), ("off", True)):
        monkeypatch.setenv("BURNISH_KERNELS", text)
        assert is_switched_off("BURNISH_KERNELS") is is_off
    for text in ("OFF", "0", "no", " off"):
        monkeypatch.setenv("BURNISH_KERNELS", text)
        with pytest.raises(
            ConfigurationError, match=f"BURNISH_KERNELS is {text!r} in the environment: write off, or leave it out"
        ):
            is_switched_off("BURNISH_KERNELS")


def test_sizes_are_in_the_digits_0_to_9() -> None:
    assert [memory_size(text) for text in ("1000", "1.5GB", "64 MiB", "٣", "٣GiB", "1_0", "-1", "", "1e3")] == [
        *(1000, 1_500_000_000, 64 << 20),
        *[None] * 6,
    ]
