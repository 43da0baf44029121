"""From a source model to a program: what trains, what the loss reads, what is differentiated, how parameters are updated; and to
the graphs that an engine opens (``lowered_graphs``). Gradients as graphs.

What comes of it, the program with its signature and state, is in ``burnish.program``; the mathematics of losses, optimizers and
operators in the layers below.
"""
