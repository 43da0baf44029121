"""The command line: one file per command. Here are its options and its words; what it does lives in the other rooms."""


def main() -> None:
    """Run the command ``burnish`` with the arguments of the process."""
    from burnish.cli.application import app

    app(prog_name="burnish")


__all__ = ["main"]
