#include "depthwise_calls.h"

namespace burnish::depthwise {

void convolve(int64_t extent, const float* x, const float* weight, const float* bias, float* y, const Geometry& geometry, int64_t stride,
              bool streamed) {
  if (extent == 3)
    convolve<float, 3>(x, weight, bias, y, geometry, stride, streamed);
  else
    convolve<float, 5>(x, weight, bias, y, geometry, stride, streamed);
}

void differentiate(int64_t extent, const float* dy, const float* x, const float* weight, float* dx, float* dw, const Geometry& geometry,
                   int64_t stride, bool streamed) {
  if (extent == 3)
    differentiate<float, 3>(dy, x, weight, dx, dw, geometry, stride, streamed);
  else
    differentiate<float, 5>(dy, x, weight, dx, dw, geometry, stride, streamed);
}

}  // namespace burnish::depthwise
