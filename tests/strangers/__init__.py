"""Models that nobody here prepared: what public packages build or ship, trained as a stranger would.

Not part of ``make test``: packages are fetched for it, or it takes many minutes. ``make test-exports`` runs ``exports.py``,
``make test-shipped`` ``light.py`` and ``shipped.py``.
"""
