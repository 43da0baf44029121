// A file of its own, so that a program with other windows or elements does not wait until this is compiled.

#include "depthwise_operators.h"

namespace burnish::depthwise {

BURNISH_OPERATORS(CPU) {
  operators.implement<&depthwise_convolution<BFloat16, 3>>("depthwise_convolution_bfloat16");
  operators.implement<&depthwise_convolution_gradient<BFloat16, 3>>("depthwise_convolution_gradient_bfloat16");
}

}  // namespace burnish::depthwise
