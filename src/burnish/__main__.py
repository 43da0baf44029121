"""Entry point of ``python -m burnish``."""

from burnish.cli import main

if __name__ == "__main__":
    main()
