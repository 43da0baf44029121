"""The version of burnish."""

__version__ = "0.1.0"
"""Change it here first. ``.github/check_release.py`` then names the other files that contain it."""
