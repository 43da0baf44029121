"""What kernels of more than one engine share: headers in C++, how a library is compiled, and graph passes that call them.

A kernel's mathematics is written once, in headers here, against ``tensor.h``. Each engine has an ``engine_tensor.h`` of its own,
which says what a tensor and a thread are there, and files that make operators of the engine's out of what stands here.
Nothing here imports an engine.
"""
