"""Write docs/commands.md: every command with its arguments and options, from their declarations.

Run it with ``make docs`` after a change of an option; a test compares the file with what this writes.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from typer.main import get_command

from burnish.cli.application import app
from burnish.cli.help import Described, described, summary, usage

PAGE = Path(__file__).with_name("commands.md")
INTRODUCTION = """\
# Commands

Written by `docs/generate_command_page.py` (`make docs`) from the declarations of the options; do not edit it by hand.

`burnish COMMAND --help` shows the options that most people need (**bold** here), and `burnish COMMAND --help-all` all of them.
`burnish --install-completion` lets the shell complete commands and options. With `--debug`, which may stand anywhere, errors and
warnings say where in the code they come from.
A repeatable option may be given several times.

The exit status is 0 if all went well, 1 after an error, 2 for a command line that is refused, and 130 after Ctrl-C.
"""


def command_page() -> str:
    """Return the page."""
    group: Any = get_command(app)
    return "\n".join([INTRODUCTION, *(_section(name, command) for name, command in group.commands.items())])


def _section(name: str, command: Any) -> str:
    listed = described(command)
    arguments = [one for one in listed if one.is_argument]
    options = [one for one in listed if not one.is_argument]
    parts = [f"## burnish {name}", summary(command.help, "`"), f"```text\n{usage(f'burnish {name}', listed)}\n```"]
    if arguments:
        parts.append(_table("Argument", arguments))
    groups = list(dict.fromkeys(one.group for one in options))
    for group in groups:
        if len(groups) > 1:
            parts.append(f"**{group}**")
        parts.append(_table("Option", [one for one in options if one.group == group]))
    return "\n\n".join(parts) + "\n"


def _table(title: str, listed: Sequence[Described]) -> str:
    lines = [f"| {title} | Meaning | Default |", "| --- | --- | --- |"]
    for one in listed:
        names = ", ".join(f"`{name}`" for name in (one.short, one.long) if name)
        meaning = " ".join(filter(None, [one.text, one.details]))
        lines.append(f"| {f'**{names}**' if one.is_common else names} | {_cell(meaning)} | {_cell(one.default)} |")
    return "\n".join(lines)


def _cell(text: str) -> str:
    return text.replace("|", "&#124;").replace("<", "&lt;").replace("*", "\\*")


if __name__ == "__main__":
    PAGE.write_text(command_page(), encoding="utf-8")
    print(f"wrote {PAGE.name}")
