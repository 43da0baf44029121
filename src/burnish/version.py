"""The version of burnish."""

__version__ = "0.1.0"
