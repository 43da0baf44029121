"""The version of burnish."""

__version__ = "0.1.0"
"""Change it here first: ``.github/check_release.py`` then names every other file that must say the same."""
