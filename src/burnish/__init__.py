"""burnish: a training compiler for ONNX models."""
