"""Writes the network of ``finetune_models.ChannelsLast`` as Keras' own: ``finetune_keras.py WEIGHTS.npz FILE.onnx BATCH``.

Runs where Keras, TensorFlow and tf2onnx are, and neither PyTorch nor burnish.
"""

from __future__ import annotations

import sys

import keras
import numpy as np
import tensorflow as tf
import tf2onnx

PIXELS = 32


def main(weights: str, path: str, batch: str) -> None:
    """Build the network, set its weights, and write it.

    Args:
        weights: an ``.npz`` file, arrays by the names of the PyTorch module.
        path: of the ONNX file.
        batch: ``1`` or ``dynamic``.
    """
    arrays = np.load(weights)
    x = inputs = keras.Input((PIXELS, PIXELS, 3), batch_size=1 if batch == "1" else None, name="x")
    for number in range(0, 9, 3):
        kernel = arrays[f"features.{number}.weight"].transpose(2, 3, 1, 0)
        convolution = keras.layers.Conv2D(kernel.shape[3], 3, strides=2, use_bias=False)
        normalization = keras.layers.BatchNormalization(epsilon=1e-5)
        x = keras.layers.ReLU()(normalization(convolution(keras.layers.ZeroPadding2D(1)(x))))
        convolution.set_weights([kernel])
        names = ("weight", "bias", "running_mean", "running_var")
        normalization.set_weights([arrays[f"features.{number + 1}.{name}"] for name in names])
    dense = keras.layers.Dense(arrays["dense.weight"].shape[0], activation="softmax", name="dense")
    outputs = dense(keras.layers.GlobalAveragePooling2D()(x))
    dense.set_weights([arrays["dense.weight"].T, arrays["dense.bias"]])
    model = keras.Model(inputs, outputs)
    signature = [tf.TensorSpec(inputs.shape, tf.float32, name="x")]
    tf2onnx.convert.from_function(tf.function(model), input_signature=signature, opset=17, output_path=path)


if __name__ == "__main__":
    main(*sys.argv[1:])
