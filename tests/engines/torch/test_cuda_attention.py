"""Attention for CUDA: which graphs take it, and its results and gradients by stand-ins of PyTorch's kernels."""

from __future__ import annotations

import math
from types import SimpleNamespace

import onnx
import onnx_ir as ir
import pytest
import torch

import burnish
from burnish.engines.torch.bindings.attention import cuda
from burnish.engines.torch.translate.translation import run, translate
from burnish.kernels.attention import use_cuda_attention
from burnish.rewriting.recognize_attention import recognize_attention
from oracles.semantic_gradients import semantic_gradients

HEADER = '<ir_version: 10, opset_import: ["": 18]>\n'
DTYPES = (ir.DataType.FLOAT, ir.DataType.FLOAT16, ir.DataType.BFLOAT16)
CPU = torch.device("cpu")
CAUSAL = """
    ones = ConstantOfShape <value = float[1] {1}> (square)
    lower = Trilu <upper = 0> (ones)
    hidden = Equal (lower, zero)
    m = Where (hidden, least, zero)"""


class Kernels:
    """What PyTorch's kernels compute and ask for, by the functions that its dispatcher calls."""

    def __init__(self):
        self.called = []
        self._scaled_dot_product_flash_attention = SimpleNamespace(default=self.flash)
        self._scaled_dot_product_flash_attention_backward = SimpleNamespace(default=self.flash_backward)
        self._scaled_dot_product_efficient_attention = SimpleNamespace(default=self.efficient)
        self._scaled_dot_product_efficient_attention_backward = SimpleNamespace(default=self.efficient_backward)

    @staticmethod
    def probabilities(query, key, bias, causal, scale):
        assert query.stride(-1) == key.stride(-1) == 1
        scores = torch.matmul(query.float(), key.float().mT) * scale
        if causal:
            scores = scores.masked_fill(torch.ones_like(scores, dtype=torch.bool).triu(1), -math.inf)
        if bias is not None:
            assert bias.shape == scores.shape
            assert bias.dtype == query.dtype
            assert bias.stride(-1) == 1
            assert all(stride * bias.element_size() % cuda.ALIGNMENT == 0 for stride in bias.stride()[:-1])
            scores = scores + bias.float()
        hidden = (scores == -math.inf).all(-1, keepdim=True)
        return torch.where(hidden, 0.0, torch.softmax(scores, -1))

    def forward(self, query, key, value, bias, causal, scale):
        result = torch.matmul(self.probabilities(query, key, bias, causal, scale), value.float()).to(value.dtype)
        return result.transpose(1, 2).contiguous().transpose(1, 2), torch.zeros(query.shape[:3])

    def backward(self, flow, query, key, value, result, bias, causal, scale):
        """The formula of the kernels, which take the sum of flow times result in place of that over probabilities."""
        p = self.probabilities(query, key, bias, causal, scale)
        flow = flow.float()
        sums = (flow * result.float()).sum(-1, keepdim=True)
        scores = p * (torch.matmul(flow, value.float().mT) - sums) * scale
        gradients = torch.matmul(scores, key.float()), torch.matmul(scores.mT, query.float()), torch.matmul(p.mT, flow)
        return tuple(gradient.to(query.dtype) for gradient in gradients)

    def flash(self, query, key, value, dropout, causal, *, scale):
        assert query.dtype in (torch.float16, torch.bfloat16)
        self.called.append("flash, causal" if causal else "flash")
        result, logarithms = self.forward(query, key, value, None, causal, scale)
        return result, logarithms, None, None, query.shape[2], key.shape[2], torch.zeros(2), torch.zeros(()), torch.zeros(0)

    def flash_backward(self, flow, query, key, value, result, logarithms, q, k, m, n, dropout, causal, seed, offset, *, scale):
        assert (q, k, m, n, dropout) == (None, None, query.shape[2], key.shape[2], 0.0)
        return self.backward(flow, query, key, value, result, None, causal, scale)

    def efficient(self, query, key, value, bias, keeps, dropout, causal, *, scale):
        assert keeps
        assert dropout == 0.0
        self.called.append("efficient, causal" if causal else "efficient")
        return *self.forward(query, key, value, bias, causal, scale), torch.zeros(()), torch.zeros(())

    def efficient_backward(
        self, flow, query, key, value, bias, result, logarithms, seed, offset, dropout, wanted, causal, *, scale
    ):
        assert wanted == [True, True, True, False]
        assert flow.transpose(1, 2).is_contiguous()
        assert result.transpose(1, 2).is_contiguous()
        return *self.backward(flow, query, key, value, result, bias, causal, scale), None


@pytest.fixture
def kernels(monkeypatch) -> Kernels:
    stand_in = Kernels()
    monkeypatch.setattr(cuda, "_aten", stand_in)
    return stand_in


def model_of(mask: str = "", made: str = "", zeros: bool = False, keys: int = 20, width: int = 8, tail: str = "") -> ir.Model:
    """Attention of 20 queries to ``keys`` keys; the mask an input of this shape, or made in the graph."""
    masked = "masked = Add (scores, m)" if mask or made else "masked = Identity (scores)"
    softmax = "p = Softmax <axis = -1> (masked)"
    if zeros:
        softmax = "raw = Softmax <axis = -1> (masked)\n nan = IsNaN (raw)\n p = Where (nan, zero, raw)"
    q, k = f"[batch, 3, 20, {width}]", f"[batch, 3, {keys}, {width}]"
    graph = onnx.parser.parse_model(f"""{HEADER}
    graph (float{q} q, float{k} k, float{k} v{f", float{mask} m" if mask else ""}) => (float{q} y)
      <float zero = {{0}}, float least = {{-3.4028234e38}}, int64[2] square = {{20, {keys}}}>
    {{
        {made}
        s = Constant <value = float[1] {{0.59}}> ()
        t = Transpose <perm = [0, 1, 3, 2]> (k)
        qs = Mul (q, s)
        scores = MatMul (qs, t)
        {masked}
        {softmax}
        {tail}
        y = MatMul ({"dropped" if tail else "p"}, v)
    }}""")
    return burnish.load(graph)


def gradients_of(model: ir.Model, dtypes=DTYPES) -> ir.Model:
    changed = semantic_gradients(model, wrt=["q", "k", "v"], of="y")
    recognize_attention(changed)
    use_cuda_attention(changed.graph, dtypes, 18)
    changed.opset_imports.setdefault("burnish", 1)
    return changed


def kinds(model: ir.Model) -> list[str]:
    return [node.op_type for node in model.graph]


def drawn(keys: int = 20, width: int = 8) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    extents = {"q": 20, "k": keys, "v": keys, "cotangent:y": 20}
    return {name: torch.randn(2, 3, extent, width, generator=generator) for name, extent in extents.items()}


MASKS = {
    "none": {},
    "one for all": {"mask": "[20, 20]"},
    "of each sample's keys": {"mask": "[batch, 1, 1, 20]"},
    "of each head": {"mask": "[batch, 3, 20, 20]"},
    "rows that are not aligned": {"mask": "[20, 21]", "keys": 21},
    "causal": {"made": CAUSAL},
}


@pytest.mark.slow
@pytest.mark.parametrize("form", MASKS)
def test_results_and_gradients_are_those_of_attention_in_pieces(form, kernels):
    settings = MASKS[form]
    plain = burnish.grad(model_of(**settings), wrt=["q", "k", "v"], of="y")
    model = gradients_of(model_of(**settings))
    assert {"CudaAttention", "CudaAttentionGrad"} <= set(kinds(model))
    assert not {"MatMul", "Softmax", "SoftmaxGrad", "Mul", "Trilu"} & set(kinds(model))
    inputs = drawn(settings.get("keys", 20))
    if "mask" in settings:
        shape = [{"batch": 2}.get(extent, extent) for extent in settings["mask"].strip("[]").split(", ")]
        inputs["m"] = torch.randn([int(extent) for extent in shape], generator=torch.Generator().manual_seed(1))
    found, expected = run(translate(model, CPU), model, inputs), run(translate(plain, CPU), plain, inputs)
    assert kernels.called == ["efficient, causal" if form == "causal" else "efficient"]
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        torch.testing.assert_close(found[name], tensor, rtol=1e-4, atol=1e-5, msg=name)


@pytest.mark.slow
@pytest.mark.parametrize("zeros", [False, True])
def test_a_query_that_no_key_is_shown_to_is_zero_only_where_the_model_says_so(zeros, kernels):
    inputs = drawn() | {"m": torch.zeros(2, 1, 20, 20)}
    inputs["m"][1, 0, 4] = -math.inf
    plain = burnish.grad(model_of("[batch, 1, 20, 20]", zeros=zeros), wrt=["q", "k", "v"], of="y")
    model = gradients_of(model_of("[batch, 1, 20, 20]", zeros=zeros))
    assert "CudaAttentionGrad" in kinds(model)
    found, expected = run(translate(model, CPU), model, inputs), run(translate(plain, CPU), plain, inputs)
    assert bool(expected["y"].isnan().any()) is not zeros
    for name, tensor in expected.items():
        torch.testing.assert_close(found[name], tensor, rtol=1e-4, atol=1e-5, equal_nan=True, msg=name)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_sixteen_bits_without_a_mask_are_flash_attention(dtype, causal, kernels):
    inputs = {name: tensor.to(dtype) for name, tensor in drawn().items()}
    settings = None, 0.3, False, causal
    heads = inputs["q"], inputs["k"], inputs["v"]
    result, *kept = cuda.attention(*heads, *settings)
    gradients = cuda.attention_gradient(inputs["cotangent:y"], *heads, result, *kept, *settings)
    assert kernels.called == ["flash, causal" if causal else "flash"]
    exact = [tensor.double().requires_grad_() for tensor in heads]
    expected = torch.nn.functional.scaled_dot_product_attention(*exact, is_causal=causal, scale=0.3)
    expected.backward(inputs["cotangent:y"].double())
    for actual, right in zip((result, *gradients), (expected, *(tensor.grad for tensor in exact)), strict=True):
        torch.testing.assert_close(actual.double(), right, rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize(
    ("settings", "dtypes"),
    [({"width": 6}, DTYPES), ({"width": 256}, DTYPES), ({}, (ir.DataType.BFLOAT16,)), ({"tail": "dropped = Relu (p)"}, DTYPES)],
    ids=["narrow heads", "wide heads", "a dtype without kernels", "probabilities that are changed, as dropout does"],
)
def test_what_the_kernels_do_not_take_stays(settings, dtypes):
    assert not {"CudaAttention", "CudaAttentionGrad"} & set(kinds(gradients_of(model_of(**settings), dtypes)))


@pytest.mark.parametrize(
    "made",
    [
        CAUSAL.replace("upper = 0", "upper = 1"),
        CAUSAL.replace("least, zero)", "least, one)").replace("ones =", "one = Constant <value = float {1}> ()\n    ones =", 1),
        CAUSAL.replace("(lower, zero)", "(lower, lower)"),
    ],
    ids=["keys before", "adds to what is seen", "hides all"],
)
def test_what_is_not_quite_causal_stays_a_mask(made):
    model = gradients_of(model_of(made=made))
    (node,) = (node for node in model.graph if node.op_type == "CudaAttention")
    assert node.attributes["causal"].as_int() == 0
    assert node.inputs[3] is not None


def test_a_card_before_ampere_keeps_attention_in_pieces(monkeypatch):
    monkeypatch.setattr(torch.backends.cuda, "is_flash_attention_available", lambda: True)
    for capability, expected in (((7, 5), ()), ((8, 0), DTYPES), ((9, 0), DTYPES)):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device, found=capability: found)
        assert cuda.dtypes(torch.device("cuda", 0)) == expected
    monkeypatch.setattr(torch.backends.cuda, "is_flash_attention_available", lambda: False)
    assert cuda.dtypes(torch.device("cuda", 0)) == ()
