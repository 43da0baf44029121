// A file of its own, so that a float32 program does not wait until this is compiled.

#include "batch_norm_synchronized.h"

namespace burnish {

BURNISH_OPERATORS(CPU) {
  operators.implement<&batch_norm_moments<BFloat16>>("batch_norm_moments_bfloat16");
  operators.implement<&batch_norm_apply<BFloat16>>("batch_norm_apply_bfloat16");
  operators.implement<&batch_norm_gradient_sums<BFloat16>>("batch_norm_gradient_sums_bfloat16");
  operators.implement<&batch_norm_gradient_apply<BFloat16>>("batch_norm_gradient_apply_bfloat16");
}

}  // namespace burnish
