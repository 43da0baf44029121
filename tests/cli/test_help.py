"""The help of every command: short and long, at 80 columns, one sentence and a default for each option."""

from __future__ import annotations

import os
import re
import subprocess
import sys

import pytest
from typer.main import get_command
from typer.testing import CliRunner

from burnish.cli.application import app
from burnish.cli.help import FEW, described

COMMANDS = dict(sorted(get_command(app).commands.items()))
VAGUE = re.compile(r"\b(what|whether|anew)\b", re.IGNORECASE)
LONGEST = 110


def shown(*arguments: str, columns: int = 80) -> str:
    result = CliRunner().invoke(app, list(arguments), env={"COLUMNS": str(columns)})
    assert result.exit_code == 0, result.output
    return result.stdout


@pytest.mark.parametrize("command", COMMANDS)
def test_the_short_help_shows_few_options_and_says_where_the_rest_is(command):
    options = [one for one in described(COMMANDS[command]) if not one.is_argument]
    text = shown(command, "--help")
    names = re.findall(r"^  (?:-\w, |    )(--[a-z0-9-]+)", text, re.MULTILINE)
    assert len(names) <= FEW + 1
    hidden = len(options) + 1 - len(names)
    assert (f"{hidden} more options: burnish {command} --help-all" in text) == (hidden > 0)
    assert [one.long for one in options if one.default == "required" and one.long.split()[0] not in names] == []


@pytest.mark.parametrize("command", COMMANDS)
def test_the_long_help_lists_every_option_once_by_group(command):
    text = shown(command, "--help-all")
    for one in described(COMMANDS[command]):
        assert len(re.findall(rf"^ +(?:-\w, )?{re.escape(one.long)}\b", text, re.MULTILINE)) == 1, one.long
        assert one.is_argument or f"\n{one.group}:\n" in text


@pytest.mark.parametrize("command", ["", *COMMANDS])
@pytest.mark.parametrize("columns", [80, 60])
def test_no_line_is_wider_than_the_terminal(command, columns):
    for form in ("--help", "--help-all") if command else ("--help",):
        lines = shown(*filter(None, [command]), form, columns=columns).splitlines()
        # A word, such as a list of settings, and the line that says how the command is called are not cut.
        assert [line for line in lines[1:] if len(line) > columns and len(line.split()) > 3] == []


@pytest.mark.parametrize("command", COMMANDS)
def test_each_option_has_one_short_sentence_and_a_default(command):
    for one in described(COMMANDS[command]):
        assert one.text.endswith("."), one
        assert ". " not in one.text.replace("e.g. ", ""), one
        assert len(one.text) <= LONGEST, one
        assert not VAGUE.search(one.text), one
        assert one.default or one.is_argument, one


def test_short_names_mean_the_same_in_all_commands():
    meanings: dict[str, set[str]] = {}
    for command in COMMANDS.values():
        options = [one for one in described(command) if one.short]
        assert len({one.short for one in options}) == len(options)
        for one in options:
            meanings.setdefault(one.short, set()).add(one.long.split()[0])
    assert {short: len(names) for short, names in meanings.items()} == dict.fromkeys(meanings, 1)
    assert {"-b": {"--batch-size"}, "-d": {"--data"}, "-e": {"--epochs"}, "-o": {"--output"}}.items() <= meanings.items()


def test_what_a_command_decides_itself_is_its_default():
    defaults = {one.long.split()[0]: one.default for one in described(COMMANDS["finetune"])}
    assert defaults["--epochs"] == "5"
    assert defaults["--lr"] == "found by trial steps"
    assert {one.long.split()[0]: one.default for one in described(COMMANDS["train"])}["--epochs"] == "1"


def test_an_argument_that_may_be_repeated_is_shown_so():
    assert "Usage: burnish predict MODEL DATA... [OPTIONS]" in shown("predict", "--help")
    assert "Usage: burnish evaluate MODEL [DATA] [OPTIONS]" in shown("evaluate", "--help")


def test_burnish_alone_prints_its_commands():
    result = CliRunner().invoke(app, [])
    assert result.exit_code == 2
    assert [name for name in COMMANDS if f"\n  {name} " not in result.stdout] == []


def test_completion_names_commands_and_options_without_a_library():
    for words, expected in {
        "burnish tra": "train",
        "burnish train --ep": "--epochs",
        "burnish new --help-": "--help-all",
    }.items():
        code = (
            "import sys\ntry:\n    from burnish.cli.application import app\n    app(prog_name='burnish')\n"
            "finally:\n    print([name for name in ('numpy', 'onnx', 'onnxruntime') if name in sys.modules], file=sys.stderr)"
        )
        asked = {"_BURNISH_COMPLETE": "complete_bash", "COMP_WORDS": words, "COMP_CWORD": str(len(words.split()) - 1)}
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env={**os.environ, **asked})
        assert expected in done.stdout.split(), done.stderr
        assert done.stderr.splitlines()[-1] == "[]"
