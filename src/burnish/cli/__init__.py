"""The command line: one file per command. Here are its options and its words; what it does lives in the other rooms."""

import gc

OBJECTS_BETWEEN_COLLECTIONS = 10_000
"""With the 700 of Python the imports of a run start its collector six hundred times, for a sixth of their time."""


def main() -> None:
    """Run the command ``burnish`` with the arguments of the process."""
    gc.set_threshold(OBJECTS_BETWEEN_COLLECTIONS)
    from burnish.cli.application import app

    app(prog_name="burnish")


__all__ = ["main"]
