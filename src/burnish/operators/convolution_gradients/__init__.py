"""The gradients of a convolution in standard operators: several forms of each, and the choice between them.

``lowering`` is where the semantic operators of ``burnish.operators.convolution`` become one of the forms of ``input_forms``,
``weight_forms`` and ``depthwise_weight_forms``; ``form`` chooses by the model of costs in ``costs``, ``geometry`` says what the
convolution is. Every form keeps the batch symbolic. The convolution itself is a node of the model and has no place here.
"""

from burnish.operators.convolution_gradients.lowering import lower_input_gradient, lower_weight_gradient

__all__ = ["lower_input_gradient", "lower_weight_gradient"]
