#include "batch_norm_gradient.h"

namespace burnish {

BURNISH_OPERATORS(CPU) { operators.implement<&batch_norm_gradient<float>>("batch_norm_gradient"); }

}  // namespace burnish
