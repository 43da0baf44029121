"""From which sizes on one way of computing was measured to be faster than another.

Single layers of ResNet-50, MobileNetV2 and BERT-base were timed, mostly on two cores with AVX-512; where no script is named for
it, none is kept. Each group says which benchmark shows whether its bounds hold on another machine. What a kernel
compares with what it packs itself stands in the kernel.
"""

from __future__ import annotations


class Products:
    """Products with a weight, and of batches. Benchmark: ``benchmarks/compare.py --model bert-base``."""

    LARGE = 1 << 24
    """Multiplications of a product; below, packing of the operands costs more than the kernel gains."""

    LEAST_REUSE = 56
    """Multiplications for each element of the operands from which on the kernel was measured to win with vectors of 256 bits;
    with those of 512 bits it did with fewer."""

    NARROWEST = 16
    SMALL = 1 << 16
    """Extent of a result's matrices, and multiplications of a batch for one of its inner axis; below, PyTorch's products do, and
    with vectors of 256 bits where there is one of that axis: matrices that lie side by side."""

    LARGE_WEIGHT = 1 << 18
    """Elements of a weight whose products are expected to be large."""


class SmallLayers:
    """Linear layers in one call. Benchmark: ``benchmarks/compare.py --model mlp``."""

    MOST_ELEMENTS = 1 << 16
    """Elements of a layer's results, and of what it was given, up to which it is computed in one call, and its gradients in
    another: what is beside the products runs on one thread."""


class Pointwise:
    """Convolutions of one pixel in float32. Benchmark: ``benchmarks/compare.py --model resnet50`` and ``--model
    mobilenet_v2``."""

    MOST_PIXELS = 4096
    """Results of a convolution up to which a product was measured to be as fast or faster: by up to 1.9 times with the fewest."""

    FEWEST_PIXELS = 96
    FEWEST_CHANNELS = 32
    ENOUGH_CHANNELS = 512
    """Results, and channels of them, from which on the kernel's product was measured to be the fastest with vectors of 256 bits;
    of more pixels than ``MOST_PIXELS`` it is where there are no fewer channels of the results than of what they are of, or
    enough."""

    MOST_WEIGHTS = 1 << 17
    LEAST_OF_WIDER = 64
    LEAST_PIXELS = 96
    """Weights of a convolution up to which both its gradients were measured to be faster together, by 1.0 to 1.8 times: all sums
    are gone through with every block of pixels. Channels of its wider side, and pixels for each thread, from which on they
    were."""

    LEAST_OF_NARROWER = 64
    """Channels of its narrower side from which on the gradient of the weights alone is faster as a product than oneDNN's."""


class ConvolutionProducts:
    """Convolutions as products, in float32. Benchmark: ``benchmarks/compare.py --model resnet50`` and ``--model
    mobilenet_v2``."""

    LEAST_CHANNELS = 16
    LEAST_CHANNELS_OF_GRADIENT = 64
    LEAST_CHANNELS_OF_BOTH = 16
    """Of inputs and outputs: with fewer, a product leaves most of a vector empty. A gradient of kernels with few adds up over
    large maps, where oneDNN is as fast or faster, unless it is computed together with the other gradient."""


class NarrowConvolutions:
    """Convolutions in bfloat16. Benchmark: ``benchmarks/compare.py --model resnet50 --precision bfloat16``."""

    LARGEST_MAP = 7 * 7
    """Pixels of the maps up to which a product of bfloat16 matrices was measured to be faster than oneDNN's convolution."""

    LARGEST_MAP_OF_GRADIENT = 14 * 14
    """Pixels of the maps up to which PyTorch's product of matrices was measured to be faster than oneDNN's gradient of
    weights."""

    FEWEST_PIXELS = 1024
    FEWEST_PIXELS_OF_LARGE_MAPS = 256
    """Results of a convolution of one pixel with a stride of 1 from which on the kernel was measured to be the fastest; with
    fewer, a product of matrices is, or with larger maps, oneDNN's gradient."""

    LEAST_CHANNELS = 32
    LEAST_CHANNELS_OF_ONE_PIXEL = 16
    """Channels of the images, and of the results, from which on they were measured to win, with several pixels and with one."""

    LEAST_FILLED = 0.75
    """Share of the channels that the kernel multiplies, zeros beside them, from which on it was."""

    MOST_PAIRED = 1.1
    """By how many times a batch may become larger where the kernel takes images in pairs."""


class ChosenConvolutions:
    """Convolutions whose way is measured as a step runs. Benchmark: ``benchmarks/convolution_choice.py``, which times all
    ways."""

    LARGEST_COMPARED = 7
    """Extent of square kernels of images up to which the ways were compared for the layers of networks."""


class Attention:
    """Attention in float32. Benchmark: ``benchmarks/compare.py --model bert-base``."""

    FEWEST_QUERIES = 16
    """Queries from which on the engine's own kernel is the faster one: it packs all keys and values first."""


class Recurrent:
    """Recurrent layers. Benchmark: ``benchmarks/compare_architectures.py lstm``."""

    MOST_UNITS = 512
    """Hidden units of a layer up to which its kernel was measured to be faster; with more, every thread reads a large weight for
    each frame."""
