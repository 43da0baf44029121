"""Sizes from which one way of computing was measured to be faster than another.

Single layers of ResNet-50, MobileNetV2 and BERT-base were timed, mostly on two cores with AVX-512; scripts without a name were
not kept. Each group names the benchmark that checks its bounds on another machine. Bounds on data that a kernel packs itself are
in the kernel.
"""

from __future__ import annotations


class Products:
    """Products with a weight, and batched products. Benchmark: ``benchmarks/compare.py --model bert-base``."""

    LARGE = 1 << 24
    """Multiplications in a product; below, packing the operands costs more than the kernel gains."""

    LEAST_REUSE = 56
    """Multiplications per element of the operands from which the kernel wins with vectors of 256 bits; with 512 bits, it wins
    with fewer.
    """

    NARROWEST = 16
    SMALL = 1 << 16
    """The least extent of the result's matrices, and the least number of multiplications in a batch per entry of its inner axis.
    PyTorch's products win below; with vectors of 256 bits, also if the inner axis has length one, when the matrices are side
    by side.
    """

    LARGE_WEIGHT = 1 << 18
    """Elements of a weight whose products are expected to be large."""


class SmallLayers:
    """Linear layers in one call. Benchmark: ``benchmarks/compare.py --model mlp``."""

    MOST_ELEMENTS = 1 << 16
    """Elements of a layer's input and output up to which it is computed in one call, and its gradients in another: everything but
    the products runs on one thread.
    """


class Pointwise:
    """1x1 convolutions in float32. Benchmark: ``benchmarks/compare.py --model resnet50`` and ``--model mobilenet_v2``."""

    MOST_PIXELS = 4096
    """Pixels of the output up to which a product is at least as fast: by up to 1.9 times with the fewest."""

    FEWEST_PIXELS = 96
    FEWEST_CHANNELS = 32
    ENOUGH_CHANNELS = 512
    """Pixels and channels of the output from which the kernel's product is fastest with vectors of 256 bits. For more pixels than
    ``MOST_PIXELS``, it is if the output has at least as many channels as the input, or enough of them.
    """

    MOST_WEIGHTS = 1 << 17
    LEAST_OF_WIDER = 64
    LEAST_PIXELS = 96
    """The number of weights up to which both gradients of a convolution are faster together, by 1.0 to 1.8 times: every block of
    pixels visits all sums. The channels of its wider side, and pixels per thread, from which they are.
    """

    LEAST_OF_NARROWER = 64
    """Channels of its narrower side from which the gradient of only the weights is faster as a product than oneDNN's."""


class ConvolutionProducts:
    """Convolutions as products, in float32. Benchmark: ``benchmarks/compare.py --model resnet50`` and ``--model
    mobilenet_v2``.
    """

    LEAST_CHANNELS = 16
    LEAST_CHANNELS_OF_GRADIENT = 64
    LEAST_CHANNELS_OF_BOTH = 16
    """Input and output channels: with fewer, a product leaves most of a vector empty. A weight gradient with few channels sums
    over large maps, for which oneDNN is at least as fast, unless it is computed together with the other gradient.
    """


class NarrowConvolutions:
    """Convolutions in bfloat16. Benchmark: ``benchmarks/compare.py --model resnet50 --precision bfloat16``."""

    LARGEST_MAP = 7 * 7
    """Pixels of the maps up to which a product of bfloat16 matrices is faster than oneDNN's convolution."""

    LARGEST_MAP_OF_GRADIENT = 14 * 14
    """Pixels of the maps up to which PyTorch's matrix product is faster than oneDNN's weight gradient."""

    FEWEST_PIXELS = 1024
    FEWEST_PIXELS_OF_LARGE_MAPS = 256
    """Output pixels of a 1x1 convolution with a stride of 1 from which the kernel is fastest; with fewer, a matrix product is, or
    with larger maps, oneDNN's gradient.
    """

    LEAST_CHANNELS = 32
    LEAST_CHANNELS_OF_ONE_PIXEL = 16
    """Input and output channels from which the kernels win, with several pixels and with one."""

    LEAST_FILLED = 0.75
    """The share of the kernel's multiplied channels that are not padding, from which it wins."""

    MOST_PAIRED = 1.1
    """The factor by which a batch may grow so that the kernel can take images in pairs."""


class ChosenConvolutions:
    """Convolutions whose way is measured at run time. Benchmark: ``benchmarks/convolution_choice.py``, which times all ways."""

    LARGEST_COMPARED = 7
    """The largest square image kernels for which the ways were compared on layers of networks."""


class Attention:
    """Attention in float32. Benchmark: ``benchmarks/compare.py --model bert-base``."""

    FEWEST_QUERIES = 16
    """Queries from which the engine's own kernel is faster: it packs all keys and values first."""


class Recurrent:
    """Recurrent layers. Benchmark: ``benchmarks/compare_architectures.py lstm``."""

    MOST_UNITS = 512
    """Hidden units of a layer up to which its kernel is faster; with more, every thread reads a large weight for each frame."""
