// A file of its own, so that a float32 program does not wait until this is compiled.

#include "batch_norm.h"

namespace burnish {

BURNISH_OPERATORS(CPU) { operators.implement<&batch_norm_training<BFloat16>>("batch_norm_training_bfloat16"); }

}  // namespace burnish
