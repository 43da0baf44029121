// A file of its own, so that a float32 program does not wait until this is compiled.

#include "batch_norm_gradient.h"

namespace burnish {

BURNISH_OPERATORS(CPU) { operators.implement<&batch_norm_gradient<BFloat16>>("batch_norm_gradient_bfloat16"); }

}  // namespace burnish
