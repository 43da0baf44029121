"""What runs a graph: devices and their settings, memory, recorded steps, compilation as a whole, what is read back, interrupts.

What a graph computes is none of its business: that is in ``translate`` and in ``bindings``.
"""
