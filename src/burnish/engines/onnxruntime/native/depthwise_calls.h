// Depthwise convolutions (depthwise.h) for kernels of 3x3 and 5x5, which are compiled by themselves: their loops over constant extents take a
// compiler as long as all other convolutions.

#pragma once

#include "operators.h"

#include "depthwise.h"

namespace burnish::depthwise {

// `extent` is the height and the width of each kernel; the other arguments are those of the functions for one extent.
void convolve(int64_t extent, const float* x, const float* weight, const float* bias, float* y, const Geometry& geometry, int64_t stride,
              bool streamed);
void differentiate(int64_t extent, const float* dy, const float* x, const float* weight, float* dx, float* dw, const Geometry& geometry,
                   int64_t stride, bool streamed);

}  // namespace burnish::depthwise
