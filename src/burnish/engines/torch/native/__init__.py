"""What builds and loads the engine's own kernels, and the headers that these share; the kernels stand in their families."""
