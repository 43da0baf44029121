"""The command line: one file per command. What a command does lives in the package; here are its options and its words."""


def main() -> None:
    """Run the command ``burnish`` with the arguments of the process."""
    from burnish.cli.application import app

    app(prog_name="burnish")


__all__ = ["main"]
