"""Sets of standard operators that several parts of the library go by."""

from __future__ import annotations

RANDOM_OPERATORS = frozenset(
    "Bernoulli Dropout Multinomial RandomNormal RandomNormalLike RandomUniform RandomUniformLike".split()
)
"""What draws numbers, or may."""

UNARY = frozenset(
    "Abs Acos Acosh Asin Asinh Atan Atanh BitwiseNot Ceil Celu Cos Cosh Elu Erf Exp Floor Gelu HardSigmoid HardSwish Identity "
    "IsInf IsNaN LeakyRelu Log Mish Neg Not Reciprocal Relu Round Selu Shrink Sigmoid Sign Sin Sinh Softplus Softsign Sqrt Swish "
    "Tan Tanh ThresholdedRelu".split()
)
"""What computes each element of its result from the one at its place in its only tensor."""

BROADCASTING = frozenset(
    "Add And BitShift BitwiseAnd BitwiseOr BitwiseXor Div Equal Greater GreaterOrEqual Less LessOrEqual Max Mean Min Mod Mul Or "
    "PRelu Pow Sub Sum Where Xor".split()
)
"""What computes each element of its result from those at its place in operands that are broadcast against each other."""

COMPARISONS = frozenset("Equal Greater GreaterOrEqual Less LessOrEqual".split())
"""Those of ``BROADCASTING`` that compare."""
