"""Engines: what runs a program. One module or package per engine, behind the protocol in ``base``.

An engine knows no operator's mathematics; it is given graphs of operators it can run.
"""
