"""The run time of a graph: devices and their settings, memory, recorded steps, whole-graph compilation, readback, interrupts.

The computation of a graph is in ``translate`` and ``bindings``.
"""
