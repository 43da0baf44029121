"""What builds and loads the engine's own kernels, and the headers that these share; their sources stand in ``bindings``."""
