"""The operators of ``target.toml`` in numpy: functions of a node's attributes and of its operands, None where one is left out."""

import numpy as np


def windows(attributes, x, kernel):
    """The windows of a convolution over images [N, C, H, W]: [N, groups, C / groups, H', W', kernel height, kernel width]."""
    top, left, bottom, right = attributes.get("pads", (0, 0, 0, 0))
    (down, across), (high, wide) = attributes.get("strides", (1, 1)), attributes.get("dilations", (1, 1))
    padded = np.pad(x, ((0, 0), (0, 0), (top, bottom), (left, right)))
    extents = (kernel[0] - 1) * high + 1, (kernel[1] - 1) * wide + 1
    seen = np.lib.stride_tricks.sliding_window_view(padded, extents, axis=(2, 3))[:, :, ::down, ::across, ::high, ::wide]
    return seen.reshape(len(x), attributes.get("group", 1), -1, *seen.shape[2:])


def grouped(attributes, array, axis):
    """An array with its channels, on an axis, as groups and the channels of each."""
    groups = attributes.get("group", 1)
    return array.reshape(*array.shape[:axis], groups, -1, *array.shape[axis + 1 :])


def conv(attributes, x, w, bias=None):
    seen = windows(attributes, x, w.shape[2:])
    y = np.einsum("ngchwij,gmcij->ngmhw", seen, grouped(attributes, w, 0), optimize=True)
    y = y.reshape(len(x), len(w), *y.shape[3:])
    return y if bias is None else y + bias.reshape(-1, 1, 1)


def conv_weight_grad(attributes, dy, x, w):
    seen = windows(attributes, x, w.shape[2:])
    return np.einsum("ngchwij,ngmhw->gmcij", seen, grouped(attributes, dy, 1), optimize=True).reshape(w.shape)


def conv_input_grad(attributes, dy, w, x):
    """Add up, for each pixel of the input, what reaches it from the windows that it is in: as they were taken, backwards."""
    places = windows(attributes, np.arange(x.size).reshape(x.shape) + 1, w.shape[2:])  # 0 is the padding
    terms = np.einsum("ngmhw,gmcij->ngchwij", grouped(attributes, dy, 1), grouped(attributes, w, 0), optimize=True)
    sums = np.bincount(places.reshape(-1), terms.reshape(-1), x.size + 1)
    return sums[1:].reshape(x.shape)


def batch_normalization(attributes, x, scale, bias, mean, variance):
    epsilon, momentum = attributes.get("epsilon", 1e-5), attributes.get("momentum", 0.9)
    shape = (-1, *[1] * (x.ndim - 2))
    axes = (0, *range(2, x.ndim))
    moments = (x.mean(axes), x.var(axes)) if attributes.get("training_mode") else (mean, variance)
    y = (x - moments[0].reshape(shape)) * (scale / np.sqrt(moments[1] + epsilon)).reshape(shape) + bias.reshape(shape)
    return y, *(momentum * old + (1 - momentum) * new for old, new in zip((mean, variance), moments, strict=True))


def gemm(attributes, a, b, c=None):
    a, b = a.T if attributes.get("transA") else a, b.T if attributes.get("transB") else b
    y = attributes.get("alpha", 1.0) * (a @ b)
    return y if c is None else y + attributes.get("beta", 1.0) * c


def log_softmax(attributes, x):
    axis = attributes.get("axis", -1)
    shifted = x - x.max(axis, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(axis, keepdims=True))


def reduced(function):
    def reduce(attributes, x, axes=None):
        axes = attributes.get("axes") if axes is None else axes
        return function(x, None if axes is None else tuple(map(int, axes)), keepdims=bool(attributes.get("keepdims", 1)))

    return reduce


def reshape(attributes, x, shape):
    return x.reshape([x.shape[axis] if extent == 0 else extent for axis, extent in enumerate(shape)])


def slice_of(attributes, x, starts, ends, axes=None, steps=None):
    axes = range(len(starts)) if axes is None else axes
    index = [slice(None)] * x.ndim
    for axis, start, end, step in zip(axes, starts, ends, [1] * len(starts) if steps is None else steps, strict=True):
        index[axis] = slice(start, end, step)
    return x[tuple(index)]


def scatter_elements(attributes, data, indices, updates):
    y, where = data.copy(), list(np.indices(indices.shape))
    where[attributes.get("axis", 0)] = indices
    if attributes.get("reduction", "none") == "add":
        np.add.at(y, tuple(where), updates)
    else:
        y[tuple(where)] = updates
    return y


WITHOUT_ATTRIBUTES = {
    "Add": np.add, "Sub": np.subtract, "Mul": np.multiply, "Div": np.divide, "Neg": np.negative, "Exp": np.exp,
    "Sqrt": np.sqrt, "Reciprocal": np.reciprocal, "Equal": np.equal, "Greater": np.greater, "Less": np.less,
    "And": np.logical_and, "Not": np.logical_not, "Where": np.where, "MatMul": np.matmul, "Identity": np.copy,
    "Relu": lambda x: np.maximum(x, 0),
    "Clip": lambda x, low=None, high=None: np.clip(x, low, high),
    "Expand": lambda x, shape: x * np.ones(shape, x.dtype),
    "Shape": lambda x: np.array(x.shape),
    "Squeeze": lambda x, axes: np.squeeze(x, tuple(axes)),
    "Unsqueeze": lambda x, axes: np.expand_dims(x, tuple(axes)),
    "GlobalAveragePool": lambda x: x.mean((2, 3), keepdims=True),
}  # fmt: skip
OPERATORS = {
    **{name: lambda _, *operands, run=run: run(*operands) for name, run in WITHOUT_ATTRIBUTES.items()},
    "Conv": conv, "ConvWeightGrad": conv_weight_grad, "ConvInputGrad": conv_input_grad, "Gemm": gemm, "Reshape": reshape,
    "BatchNormalization": batch_normalization, "LogSoftmax": log_softmax, "Slice": slice_of,
    "ScatterElements": scatter_elements,
    "ReduceSum": reduced(np.sum), "ReduceMean": reduced(np.mean), "ReduceProd": reduced(np.prod),
    "ArgMax": lambda attributes, x: np.argmax(x, attributes["axis"], keepdims=bool(attributes.get("keepdims", 1))),
    "Cast": lambda attributes, x: x,  # each result gets the dtype that the graph gives it
    "Constant": lambda attributes: attributes["value"],
    "ConstantOfShape": lambda attributes, shape: np.full(shape, attributes["value"][0]),
    "Flatten": lambda attributes, x: x.reshape(int(np.prod(x.shape[: attributes.get("axis", 1)])), -1),
    "Gather": lambda attributes, x, indices: np.take(x, indices, attributes.get("axis", 0)),
    "GatherElements": lambda attributes, x, indices: np.take_along_axis(x, indices, attributes.get("axis", 0)),
}  # fmt: skip
