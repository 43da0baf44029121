#include "batch_norm.h"

namespace burnish {

BURNISH_OPERATORS(CPU) { operators.implement<&batch_norm_training<float>>("batch_norm_training"); }

}  // namespace burnish
