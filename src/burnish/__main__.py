"""``python -m burnish``: the command line."""

from burnish.cli import main

if __name__ == "__main__":
    main()
