"""The compiler: turns a source model into a training program, and into the graphs that an engine opens (``lowered_graphs``).

It selects the weights that train and the values that the loss reads, differentiates the model and adds the optimizer's updates.
It also returns gradients as graphs (``grad``).

The program that it returns, with its signature and state, is in ``burnish.program``.
"""
