"""Files: a program as a folder or as one ONNX file, exported models, and state files; how files are written atomically.

Programs are in ``burnish.program``; checkpoints and run folders, which hold more than a state, in ``burnish.training``; models
that are read to be compiled, in ``burnish.importer``.
"""
