"""Operators and forms of them that only graphics processors have kernels for: the same as others, or as NumPy computes them."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import pytest
import torch

import burnish
from oracles.onnxruntime_outputs import onnxruntime_outputs
from oracles.runtime_operators import B, Case, D, H, N, S

RNG = np.random.default_rng(5)
HEADS = {"num_heads": N}


def computed(
    op_type: str, inputs: list[np.ndarray | None], attributes: dict[str, Any] | None = None, **record: Any
) -> np.ndarray:
    case = Case(op_type, "form", inputs, attributes or {}, batched=(), **record)
    loaded = burnish.load(case.model())
    assert {node.domain for node in loaded.graph} == {""}
    return onnxruntime_outputs(loaded, case.feeds("float32"))["output0"]


def close(actual: np.ndarray, expected: np.ndarray) -> None:
    np.testing.assert_allclose(actual, expected, rtol=2e-5, atol=2e-6)


def gelu(x: np.ndarray, approximate: str = "none") -> np.ndarray:
    return torch.nn.functional.gelu(torch.tensor(x), approximate=approximate).numpy()


@pytest.mark.parametrize("biased", [False, True])
def test_packed_queries_keys_and_values(biased: bool) -> None:
    q, k, v = RNG.normal(size=(3, B, S, N, D))
    bias = RNG.normal(size=3 * H) if biased else None
    rows = [x.reshape(B, S, H) for x in (q, k, v)]
    apart = computed("MultiHeadAttention", [*rows, bias], HEADS)
    close(computed("MultiHeadAttention", [np.stack([q, k, v], 3), None, None, bias], HEADS), apart)
    close(computed("MultiHeadAttention", [rows[0], np.stack([k, v], 3), None, bias], HEADS), apart)


def test_a_mask_of_the_longest_sequence() -> None:
    x, weight, bias = RNG.normal(size=(B, S, 5)), RNG.normal(size=(5, 3 * H)), RNG.normal(size=3 * H)
    mask = np.tril(np.ones((B, 1, 9, 9), np.int32))
    past = RNG.normal(size=(2, B, N, 3, D))
    causal = computed("Attention", [x, weight, bias, None, past], {**HEADS, "unidirectional": 1})
    close(computed("Attention", [x, weight, bias, mask, past], HEADS), causal)


def test_sums_and_activations() -> None:
    x, bias, skip = RNG.normal(size=(B, S, H)), RNG.normal(size=H), RNG.normal(size=(B, S, H))
    close(computed("BiasAdd", [x, bias, skip]), x + bias + skip)
    left, right = np.split(x + bias, 2, -1)
    close(computed("BiasSplitGelu", [x, bias]), left * gelu(right))
    close(computed("BiasDropout", [x, bias, skip, np.array(0.5)], held=(3,)), x + bias + skip)
    close(computed("BiasDropout", [x, None, None, np.array(0.5)], held=(3,)), x)


def test_products() -> None:
    a, b, bias = RNG.normal(size=(B, S, 5)), RNG.normal(size=(5, H)), RNG.normal(size=H)
    close(computed("GemmFastGelu", [a, b, bias]), gelu(a @ b + bias, "tanh"))
    attributes = {"alpha": 0.5, "transB": 1, "activation": "LeakyRelu", "activation_alpha": 0.2}
    product = 0.5 * (a @ b)
    close(computed("FusedMatMulActivation", [a, b.T.copy()], attributes), np.where(product > 0, product, 0.2 * product))


def test_two_bits() -> None:
    a, packed = RNG.normal(size=(B, 16)), RNG.integers(0, 256, (3, 1, 4)).astype(np.uint8)
    scales = RNG.uniform(0.1, 0.3, (3, 1))
    integers = (packed[..., None] >> np.arange(0, 8, 2)) & 3
    weight = (integers.reshape(3, 16) - 2) * scales
    attributes = {"N": 3, "K": 16, "bits": 2, "block_size": 16}
    close(computed("MatMulNBits", [a, packed, scales], attributes, held=(1, 2)), a @ weight.T)


def test_an_activation_that_is_not_known() -> None:
    case = Case("FusedGemm", "form", [np.ones((2, 3)), np.ones((3, 2))], {"activation": "Mystery"})
    with pytest.raises(burnish.errors.UnsupportedOperatorError, match=r"FusedGemm 'node' .* has the activation 'Mystery', which"):
        burnish.load(case.model())


@pytest.mark.parametrize(
    ("op_type", "inputs", "attributes"),
    [
        ("MultiHeadAttention", [np.ones((2, 3, 4))] * 3, {}),
        ("FusedMatMul", [np.ones((2, 3))], {}),
        ("GroupQueryAttention", [np.ones((2, 3, 4))] * 3, {"num_heads": 2, "kv_num_heads": 0}),
        ("SkipLayerNormalization", [np.ones((2, 3)), None, np.ones(3)], {}),
        ("MatMulNBits", [np.ones((2, 3)), np.ones((2, 1, 8), np.uint8), np.ones(2)], {"N": 2, "K": 3}),
    ],
)
def test_a_node_that_lacks_what_it_needs(op_type: str, inputs: list[np.ndarray | None], attributes: dict[str, int]) -> None:
    case = Case(op_type, "form", inputs, attributes)
    with pytest.raises(burnish.errors.ModelError, match=rf"{op_type} 'node' .* lacks an input or an attribute .*: export"):
        burnish.load(case.model())


def test_the_bias_of_a_dropout_trains_with_it() -> None:
    x, bias = RNG.normal(size=(64, H)), RNG.normal(size=H)
    case = Case("BiasDropout", "form", [x, bias, None, np.array(0.25), np.array(True)], held=(1, 3, 4))
    program = burnish.compile(case.model(symbolic=True), loss="mean_squared_error", optimizer="sgd:lr=1.0", metrics=())
    session = burnish.Session(program)
    feeds = {"input0": x.astype(np.float32)}
    close(session.predict(feeds)["output0"], x + bias)
    session.step(feeds | {"targets": np.zeros((64, H), np.float32)})
    gradient = bias - session.state()["param/input1"]
    without_dropout = 2 * (x + bias).sum(0) / x.size
    assert not np.allclose(gradient, without_dropout, rtol=1e-2)
    assert np.corrcoef(gradient, without_dropout)[0, 1] > 0.8


@pytest.mark.parametrize("is_last", [True, False])
def test_group_normalization(is_last: bool) -> None:
    x, skip, (scale, bias, more) = RNG.normal(size=(B, 6, 3, 4)), RNG.normal(size=(B, 6, 3, 4)), RNG.normal(size=(3, 6))

    def placed(y: np.ndarray) -> np.ndarray:
        return np.moveaxis(y, 1, -1) if is_last else y

    def normalized(y: np.ndarray) -> torch.Tensor:
        return torch.nn.functional.group_norm(torch.tensor(y), 3, torch.tensor(scale), torch.tensor(bias), 1e-3)

    attributes = {"groups": 3, "epsilon": 1e-3, "channels_last": int(is_last)}
    activated = computed("GroupNorm", [placed(x), scale, bias], {**attributes, "activation": 1})
    close(activated, placed(torch.nn.functional.silu(normalized(x)).numpy()))
    skipping = computed(
        "SkipGroupNorm", [placed(x), scale, bias, placed(skip), more], {**attributes, "activation": 0}, outputs=(0, 1)
    )
    close(skipping, placed(normalized(x + skip + more[:, None, None]).numpy()))
    by_channel = computed("SkipGroupNorm", [placed(x), scale, bias, skip[:, :, 0, 0]], attributes)
    close(by_channel, placed(normalized(x + skip[:, :, :1, :1]).numpy()))


def test_a_softmax_after_a_bias() -> None:
    x, bias = RNG.normal(size=(B, 3, 4, 5)), RNG.normal(size=(B, 1, 1, 5))
    expected = torch.softmax(torch.tensor(x + bias), -1).numpy()
    close(computed("BiasSoftmax", [x, bias], {"axis": 3, "is_inner_broadcast": 0}), expected)
    flat = torch.softmax(torch.tensor(x + bias).reshape(B, 3, 20), -1).numpy().reshape(x.shape)
    close(computed("BiasSoftmax", [x, bias], {"axis": 2, "is_inner_broadcast": 0}), flat)


@pytest.mark.parametrize("is_both", [False, True])
def test_distances_of_places(is_both: bool) -> None:
    """The buckets of T5, as transformers computes them."""
    table = RNG.normal(size=(16, N))
    distance = torch.arange(30)[None, :] - torch.arange(30)[:, None]
    buckets, first = (8, (distance > 0) * 8) if is_both else (16, 0)
    distance = distance.abs() if is_both else -distance.clamp(max=0)
    exact = buckets // 2
    far = exact + (torch.log(distance.float() / exact) / np.log(20 / exact) * (buckets - exact)).clamp(min=-exact).long()
    bucket = first + torch.where(distance < exact, distance, far.clamp(max=buckets - 1))
    lengths = [np.array(30), np.array(30)]
    attributes = {"max_distance": 20, "is_bidirectional": int(is_both)}
    close(computed("RelativePositionBias", [table, *lengths], attributes), table[bucket.numpy()].transpose(2, 0, 1)[None])


def test_gated_distances_of_places() -> None:
    query, bias, weight, added = RNG.normal(size=(B, S, H)), RNG.normal(size=H), RNG.normal(size=(D, 8)), RNG.normal(size=8)
    distances, factor = RNG.normal(size=(1, N, S, S)), RNG.normal(size=(1, N, 1, 1))
    heads = (query + bias).reshape(B, S, N, D).transpose(0, 2, 1, 3)
    first, second = np.split(1 / (1 + np.exp(-(heads @ weight + added).reshape(B, N, S, 2, 4).sum(-1))), 2, -1)
    expected = (first * (second * factor - 1) + 2) * distances
    close(computed("GatedRelativePositionBias", [query, bias, distances, weight, added, factor], HEADS), expected)


def test_matrices_that_are_too_large_to_write_out_stay() -> None:
    case = Case("Inverse", "large", [np.eye(40)[None]])
    assert [node.op_type for node in burnish.load(case.model()).graph] == ["Inverse"]


def test_a_new_axis() -> None:
    """ONNX Runtime 1.24 has a kernel, and ends the process in it."""
    x = RNG.normal(size=(B, S))
    close(computed("ExpandDims", [x, np.array(-2, np.int32)], held=(1,)), x[:, None])


@pytest.mark.parametrize("op_type", ["NhwcConv", "NhwcFusedConv"])
def test_convolutions_of_images_with_channels_last(op_type: str) -> None:
    x, weight, bias, more = RNG.normal(size=(B, 6, 5, 4)), RNG.normal(size=(6, 2, 3, 2)), RNG.normal(size=6), RNG.normal(size=6)
    images = torch.tensor(x).permute(0, 3, 1, 2)
    y = torch.nn.functional.conv2d(
        torch.nn.functional.pad(images, (0, 0, 1, 0)), torch.tensor(weight), torch.tensor(bias), stride=(2, 1), groups=2
    ).permute(0, 2, 3, 1)
    attributes = {"group": 2, "strides": [2, 1], "pads": [1, 0, 0, 0]}
    if op_type == "NhwcConv":
        close(computed(op_type, [x, weight, bias], attributes), y.numpy())
    else:
        summand = np.broadcast_to(more, y.shape).copy()
        fused = computed(op_type, [x, weight, bias, summand], {**attributes, "activation": "Relu"})
        close(fused, torch.relu(y + torch.tensor(more)).numpy())


SIGNALS = pytest.mark.parametrize(("shape", "axes"), [((6,), 1), ((3, 5), 1), ((2, 4, 6), 2), ((2, 3, 4, 7), 3)])


def spectrum_case(op_type: str, x: np.ndarray, axes: int) -> onnx.ModelProto:
    return Case(op_type, "form", [x], {"signal_ndim": axes, "onesided": 1, "normalized": 0}).model("float64")


def gradient_of(model: onnx.ModelProto, x: np.ndarray, dy: np.ndarray) -> np.ndarray:
    gradient = burnish.grad(model, wrt=["input0"], of="output0")
    return burnish.engines.get("reference").run(gradient, {"input0": x, "cotangent:output0": dy})["grad:input0"]


@SIGNALS
def test_transforms_of_real_signals(shape: tuple[int, ...], axes: int) -> None:
    x = torch.tensor(RNG.normal(size=shape), requires_grad=True)
    expected = torch.view_as_real(torch.fft.rfftn(x, dim=tuple(range(-axes, 0))))
    of_size = 10 * 2.0**-24 * x.detach().abs().sum().item()  # of what a sum of all values of a signal rounds to in float32
    y = computed("Rfft", [x.detach().numpy()], {"signal_ndim": axes})
    np.testing.assert_allclose(y, expected.detach().numpy(), rtol=0, atol=of_size)
    dy = RNG.normal(size=expected.shape)
    expected.backward(torch.tensor(dy))
    ours = gradient_of(spectrum_case("Rfft", x.detach().numpy(), axes), x.detach().numpy(), dy)
    np.testing.assert_allclose(ours, x.grad.numpy(), rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("is_odd", [False, True])
@SIGNALS
def test_inverse_transforms_to_real_signals(shape: tuple[int, ...], axes: int, is_odd: bool) -> None:
    half = torch.tensor(RNG.normal(size=(*shape, 2)), requires_grad=True)
    lengths = (*shape[-axes:-1], 2 * shape[-1] - 1 - (not is_odd))
    expected = torch.fft.irfftn(torch.view_as_complex(half), lengths, tuple(range(-axes, 0)))
    model = spectrum_case("Irfft", half.detach().numpy(), axes)
    if is_odd:  # what ONNX Runtime's kernel returns; a file that means it says so
        kind = onnx.helper.make_tensor_type_proto(onnx.TensorProto.DOUBLE, expected.shape)
        model.graph.output[0].type.CopyFrom(kind)
    x, dy = half.detach().numpy(), RNG.normal(size=expected.shape)
    y = burnish.engines.get("reference").run(burnish.load(model), {"input0": x})["output0"]
    np.testing.assert_allclose(y, expected.detach().numpy(), rtol=1e-9, atol=1e-9)
    expected.backward(torch.tensor(dy))
    np.testing.assert_allclose(gradient_of(model, x, dy), half.grad.numpy(), rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("attributes", [{"onesided": 0}, {"normalized": 1}])
def test_transforms_that_their_operator_does_not_define(attributes: dict[str, int]) -> None:
    model = Case("Rfft", "form", [RNG.normal(size=(3, 4))], {"signal_ndim": 1, **attributes}).model()
    with pytest.raises(burnish.errors.BurnishError, match=r"Rfft 'node'"):
        burnish.grad(model, wrt=["input0"], of="output0")
