#include "depthwise_operators.h"

namespace burnish::depthwise {

BURNISH_OPERATORS(CPU) {
  operators.implement<&depthwise_convolution<float, 3>>("depthwise_convolution");
  operators.implement<&depthwise_convolution_gradient<float, 3>>("depthwise_convolution_gradient");
}

}  // namespace burnish::depthwise
