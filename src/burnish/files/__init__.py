"""Files: a program as a folder or as one ONNX file, the model that it exports, the file of a state; how files are written whole.

What is in a program is in ``burnish.program``. Checkpoints and run folders, which hold more than a state, are in
``burnish.training``; models that are read to be compiled, in ``burnish.importer``.
"""
