// The library that ONNX Runtime loads: every kernel that it has of burnish's own.

#include "elementwise_operators.h"
#include "normalization_operators.h"
