// A file of its own, so that a program with other windows or elements does not wait until this is compiled.

#include "depthwise_operators.h"

namespace burnish::depthwise {

BURNISH_OPERATORS(CPU) {
  operators.implement<&depthwise_convolution<float, 5>>("depthwise_convolution_5x5");
  operators.implement<&depthwise_convolution_gradient<float, 5>>("depthwise_convolution_gradient_5x5");
}

}  // namespace burnish::depthwise
