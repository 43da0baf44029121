"""The Jinja templates of a report: everything that a template writes is escaped."""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING

from burnish.errors import escaped

if TYPE_CHECKING:
    from jinja2 import Environment, Template


def template(name: str) -> Template:
    """Return a template of this folder."""
    return _environment().get_template(name)


@cache
def _environment() -> Environment:
    from jinja2 import Environment, PackageLoader, StrictUndefined

    return Environment(
        loader=PackageLoader(__package__, "."),
        autoescape=True,
        # Markup is escaped after it; what steers a reader's terminal or browser is written out here.
        finalize=lambda value: value if hasattr(value, "__html__") else escaped(str(value)),
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
