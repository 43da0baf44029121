"""Modules as people write them who have other things in mind than exports, wrapped and compiled, beside PyTorch."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint, checkpoint_sequential

import burnish
import burnish.torch
from burnish.errors import GradientError, InputError, UnsupportedOperatorError
from burnish.torch import module_graphs
from burnish.torch.backend import compile_graph, reported
from oracles.combinations import spread

pytest.importorskip("onnxscript", reason="PyTorch exports modules by onnxscript")

DTYPE = torch.float64


class Translator(nn.Module):
    """Masks what comes later by a mask of its own, which ``torch.nn.Transformer`` looks into."""

    def __init__(self) -> None:
        super().__init__()
        self.transformer = nn.Transformer(4, 2, 1, 1, 6, dropout=0.0, batch_first=True)

    def forward(self, source: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(target.size(1), dtype=target.dtype)
        return self.transformer(source, target, tgt_mask=mask)


class Checkpointed(nn.Module):
    """Computes its middle again in the backward pass, in the reentrant way, where gradients are off in the forward pass."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.Linear(3, 5), nn.Tanh())
        self.middle = nn.Sequential(nn.Linear(5, 5), nn.Tanh(), nn.Linear(5, 4))
        self.head = nn.Linear(4, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = checkpoint(self.first, x, use_reentrant=True)
        return self.head(checkpoint_sequential(self.middle, 2, x, use_reentrant=True))


class StandardizedConv(nn.Conv2d):
    """Standardizes its weight, of which it takes a view (Qiao et al. 2019)."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weight = self.weight - self.weight.mean(dim=(1, 2, 3), keepdim=True)
        deviation = weight.view(weight.size(0), -1).std(dim=1).view(-1, 1, 1, 1) + 2.0**-10
        return self._conv_forward(x, weight / deviation, self.bias)


class Biased(nn.Module):
    """Reads a parameter of four axes, which is no kernel, as one of two."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.plain = StandardizedConv(2, 3, 3), nn.Conv2d(3, 3, 1)
        self.bias = nn.Parameter(torch.randn(1, 3, 2, 2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.plain(self.conv(x)) + self.bias.view(3, -1).mean(1).view(1, 3, 1, 1)


class Filtered(nn.Module):
    """A filter in the space of frequencies, whose response is a real parameter of pairs."""

    def __init__(self) -> None:
        super().__init__()
        self.response = nn.Parameter(torch.randn(5, 2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.fft.irfft(torch.fft.rfft(x) * torch.view_as_complex(self.response), n=x.shape[-1])


class Mixed(nn.Module):
    """Mixes channels in the space of frequencies by a complex parameter, after a layer of real numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.weight = nn.Parameter(torch.randn(2, 3, 3, dtype=torch.complex128))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        frequencies = torch.fft.rfft(torch.tanh(self.layer(x)))
        return torch.fft.irfft(torch.einsum("bif,iof->bof", frequencies, self.weight), n=4)


class Examined(nn.Module):
    """Computes a constant and looks at its values, before anything is read of the input."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        mask = torch.ones(3, 3, dtype=x.dtype).triu()
        if bool((mask == mask.triu()).all()):
            return torch.tanh(self.layer(x)) @ mask
        return x


def normal(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=DTYPE)


CASES: dict[str, tuple[Callable[[], nn.Module], tuple[tuple[int, ...], ...]]] = {
    "translator": (Translator, ((4, 4), (3, 4))),
    "checkpointed": (Checkpointed, ((3,),)),
    "standardized": (Biased, ((2, 4, 4),)),
    "filtered": (Filtered, ((8,),)),
    "mixed": (Mixed, ((2, 4),)),
    "examined": (Examined, ((3,),)),
}


def agree(model: nn.Module, reference: nn.Module, shapes: tuple[tuple[int, ...], ...], batch: int) -> None:
    """Compare outputs and all gradients of a call, those of inputs too, with cotangents that are random and signed."""
    results = []
    for module in (model, reference):
        module.zero_grad()
        inputs = [normal(batch, *shape, seed=seed).requires_grad_() for seed, shape in enumerate(shapes)]
        y = module(*inputs)
        (y * normal(*y.shape, seed=9)).sum().backward()
        results.append([y, *(x.grad for x in inputs), *(parameter.grad for parameter in module.parameters())])
    for found, wanted in zip(*results, strict=True):
        torch.testing.assert_close(found, wanted, rtol=1e-10, atol=1e-11)


def of(name: str) -> tuple[nn.Module, tuple[tuple[int, ...], ...]]:
    build, shapes = CASES[name]
    torch.manual_seed(0)
    module = build()
    for parameter in module.parameters():
        parameter.data = parameter.data if parameter.is_complex() else parameter.data.double()
    for part in module.modules():
        if isinstance(getattr(part, "eps", None), float):
            part.eps = 2.0**-17  # ONNX holds float32 alone
    return module, shapes


@pytest.mark.slow
@pytest.mark.parametrize("name", ["checkpointed", "standardized", "filtered", pytest.param("translator", marks=pytest.mark.slow)])
def test_a_wrapped_module_computes_what_it_does_in_pytorch(name: str) -> None:
    reference, shapes = of(name)
    wrapped = burnish.torch.wrap(copy.deepcopy(reference), tuple(normal(2, *shape) for shape in shapes))
    for batch in (3, 2):
        agree(wrapped, reference, shapes, batch)
    agree(burnish.torch.unwrap(wrapped), reference, shapes, 2)  # PyTorch computes it with the memory that it has by now


class Difference(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 3)

    def forward(self, first: torch.Tensor, second: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        return self.layer(first) - 2 * torch.tanh(self.layer(second)) * scale


@pytest.mark.slow
def test_one_example_for_several_inputs_leaves_them_apart() -> None:
    torch.manual_seed(0)
    reference = Difference().double()
    x = normal(4, 3)
    wrapped = burnish.torch.wrap(copy.deepcopy(reference), {"first": x, "second": x, "scale": x})
    agree(wrapped, reference, ((3,), (3,), (3,)), 2)
    model = burnish.load(reference, example_inputs=(x[:3], x[:3], reference.layer.weight))
    uses = {value.name: len(value.uses()) for value in model.graph.inputs}
    assert uses == {"first": 1, "second": 1, "scale": 1}


@spread(("name", "operators"), [("mixed", {"linear", "tanh"}), ("examined", {"ones", "triu", "linear", "tanh"})], test=1)
def test_what_is_complex_or_reads_nothing_is_captured_around(name: str, operators: set[str]) -> None:
    torch._dynamo.reset()
    reference, shapes = of(name)
    with reported() as graphs:
        agree(torch.compile(copy.deepcopy(reference), backend=compile_graph), reference, shapes, 3)
    ours = {operator for parts in graphs for part in parts if part.runs_in == "burnish" for operator in part.operators}
    left = [part for parts in graphs for part in parts if part.runs_in == "PyTorch"]
    assert ours >= operators
    assert all("is complex" in part.reason for part in left)
    assert bool(left) is (name == "mixed")


class Heads(nn.Module):
    """Returns what its functions make of a layer, in training and in evaluation; targets are needed in training alone."""

    def __init__(self, training, evaluation=None) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 3)
        self.functions = [training, evaluation or training]

    def forward(self, x, y=None):
        return self.functions[not self.training](self.layer(x), x, y)


def assert_same_in(wrapped: nn.Module, reference: nn.Module, *args: torch.Tensor) -> None:
    """What both return, for fresh copies of the arguments, and what they leave in these."""
    mine, theirs = ([tensor.clone() for tensor in args] for _ in range(2))
    torch.testing.assert_close(wrapped(*mine), reference(*theirs))
    torch.testing.assert_close(mine, theirs)


RETURNED = {
    "other structures": (lambda h, x, y: (h, h * 2), lambda h, x, y: {"classes": h.softmax(1)}),
    "an extent": (lambda h, x, y: (h, x.shape[0]), None),
    "a spectrum": (lambda h, x, y: torch.fft.fft(h), None),
    "an input that it writes over": (lambda h, x, y: h + x.mul_(2).sum(1, keepdim=True), None),
    "the mean over an extent": (lambda h, x, y: h.sum(0) / x.shape[0], None),
}


@spread("what", RETURNED, test=2)
def test_what_forward_returns_and_writes_is_that_of_pytorch(what):
    torch.manual_seed(0)
    reference = Heads(*RETURNED[what])
    wrapped = burnish.torch.wrap(copy.deepcopy(reference), torch.randn(2, 4))
    for part in (wrapped, reference):
        part.train()
    assert_same_in(wrapped, reference, torch.randn(5, 4))
    assert_same_in(wrapped.eval(), reference.eval(), torch.randn(3, 4))


@pytest.mark.slow
def test_a_value_that_is_written_over_has_a_gradient_as_in_pytorch():
    reference = nn.Sequential(nn.ReLU(inplace=True), nn.Linear(4, 3))
    wrapped, x, gradients = burnish.torch.wrap(copy.deepcopy(reference), torch.randn(2, 4)), torch.randn(5, 4), []
    for module in (wrapped, reference):
        leaf = x.clone().requires_grad_()
        hidden = leaf * 2
        (module(hidden).sum() + hidden.square().sum()).backward()
        gradients.append([leaf.grad, *(parameter.grad for parameter in module.parameters())])
    torch.testing.assert_close(*gradients)


@pytest.mark.slow
def test_a_complex_input_is_read_and_has_a_gradient():
    class Parts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 3)

        def forward(self, z):
            return self.layer(z.real) * self.layer(z.imag)

    reference = Parts()
    wrapped = burnish.torch.wrap(copy.deepcopy(reference), torch.randn(2, 4, dtype=torch.complex64))
    found = []
    for module in (wrapped, reference):
        z = torch.randn(5, 4, dtype=torch.complex64, generator=torch.Generator().manual_seed(0)).requires_grad_()
        module(z).sum().backward()
        found.append(z.grad)
    torch.testing.assert_close(*found)


def test_sparse_and_nested_inputs_are_refused_with_what_to_give_in_their_place():
    wrapped = burnish.torch.wrap(nn.Sequential(nn.Linear(4, 3)), torch.randn(2, 4))
    with pytest.raises(InputError, match=r"the input 'input' is sparse \(torch\.sparse_coo\).*give it its to_dense\(\)"):
        wrapped(torch.randn(2, 4).to_sparse())
    for layout in (torch.strided, torch.jagged):
        nested = torch.nested.nested_tensor([torch.randn(2, 4), torch.randn(3, 4)], layout=layout)
        with pytest.raises(InputError, match=r"'input' is nested, .*torch\.nested\.to_padded_tensor of it and a mask"):
            wrapped(nested)


@pytest.mark.slow
@pytest.mark.parametrize("mode", [torch.enable_grad, torch.no_grad, torch.inference_mode])
def test_one_sample_is_compared_once_and_computed_by_the_graph_of_several(mode, monkeypatch):
    compared = []
    compare = module_graphs.computes_the_same
    monkeypatch.setattr(module_graphs, "computes_the_same", lambda *args: compared.append(compare(*args)) or compared[-1])
    wrapped = burnish.torch.wrap(nn.Sequential(nn.Linear(4, 3)), torch.randn(2, 4))
    x = torch.randn(1, 4)
    with mode():
        for _ in range(3):
            torch.testing.assert_close(wrapped(x), wrapped[0](x))
    assert compared == [True]


@pytest.mark.slow
def test_vmap_runs_a_graph_for_extents_that_it_knows():
    wrapped = burnish.torch.wrap(nn.Sequential(nn.Linear(4, 3)), torch.randn(2, 4))
    x = torch.randn(5, 1, 4)
    with torch.no_grad():
        with pytest.raises(GradientError, match=r"extents that are new to its graph.*Call it once with such inputs outside"):
            torch.func.vmap(wrapped)(x)
        wrapped(x[0])
        torch.testing.assert_close(torch.func.vmap(wrapped)(x), wrapped[0](x))


@pytest.mark.slow
def test_other_extents_are_computed_by_graphs_in_which_they_are_open():
    class Last(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 3)

        def forward(self, x):
            return self.layer(x)[:, -1] + x.shape[1]

    reference = Last()
    wrapped = burnish.torch.wrap(copy.deepcopy(reference), torch.randn(2, 3, 4))
    for length in range(2, 14):
        assert_same_in(wrapped, reference, torch.randn(5, length, 4))


class Asking(nn.Module):
    """Goes another way for large batches, for even ones, and for two inputs of as many samples."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 3)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        hidden = self.layer(x) * (2 if x.shape[0] > 4 else 3) * (5 if x.shape[0] % 2 else 7)
        return hidden + y if x.shape[0] == y.shape[0] else hidden.sum() * y


@pytest.mark.slow
def test_another_way_that_forward_goes_for_some_extents_is_gone():
    reference = Asking()
    wrapped = burnish.torch.wrap(copy.deepcopy(reference), (torch.randn(6, 4), torch.randn(6, 3)))
    for samples, others in ((6, 6), (3, 3), (8, 7), (10, 10)):
        assert_same_in(wrapped, reference, torch.randn(samples, 4), torch.randn(others, 3))
    with pytest.raises(InputError, match=r"PyTorch cannot call Asking with inputs of the shapes \[2, 4\], \[2, 2\]"):
        wrapped(torch.randn(2, 4), torch.randn(2, 2))


@pytest.mark.slow
@pytest.mark.parametrize("training", [True, False])
def test_targets_may_be_given_in_training_alone(training):
    reference = Heads(lambda h, x, y: nn.functional.cross_entropy(h, y + 0), lambda h, x, y: h)
    x, y = torch.randn(4, 4), torch.tensor([0, 1, 2, 1])
    reference.train(training)
    wrapped = burnish.torch.wrap(copy.deepcopy(reference), (x, y) if training else x)
    for mode in (training, not training):
        args = (x, y) if mode else (x,)
        torch.testing.assert_close(wrapped.train(mode)(*args), reference.train(mode)(*args))


@pytest.mark.parametrize(
    ("returned", "reason"),
    [
        (lambda h, x, y: type("Answer", (), {"__init__": lambda self, h: setattr(self, "h", h)})(h), r"forward returns a Answer"),
        (lambda h, x, y: None, r"forward returns no tensor"),
        (lambda h, x, y: (h, h.sum().item()), r"a number of Python's that it computes from tensors"),
    ],
    ids=["object", "nothing", "item"],
)
def test_what_is_no_structure_of_tensors_is_refused(returned, reason):
    with pytest.raises(UnsupportedOperatorError, match=reason):
        burnish.torch.wrap(Heads(returned), torch.randn(2, 4))


@pytest.mark.slow
def test_dropout_that_is_always_on_is_drawn_in_evaluation():
    for function in (
        lambda h, x, y: nn.functional.dropout(h, 0.5, training=True),
        lambda h, x, y: nn.functional.scaled_dot_product_attention(h[None], h[None], h[None], dropout_p=0.5)[0],
    ):
        wrapped = burnish.torch.wrap(Heads(function), torch.randn(2, 4)).eval()
        x = torch.randn(200, 4)
        assert not torch.equal(wrapped(x), wrapped(x))
    program = burnish.compile(Heads(lambda h, x, y: nn.functional.dropout(h, 0.5, training=True)), example_inputs=x, loss="mse")
    with burnish.Session(program, threads=1) as session:
        share = float((session.predict({"x": x.numpy()})["output"] == 0).mean())
    assert 0.4 < share < 0.6


@pytest.mark.slow
@pytest.mark.parametrize("register", ["register_forward_pre_hook", "register_forward_hook"])
def test_hooks_of_the_whole_module_act_once(register):
    def hook(module, args, *output):
        return output[0] * 3 if output else (args[0] * 3,)

    x, reference = torch.randn(3, 4), nn.Sequential(nn.Linear(4, 3), nn.Dropout(0.0), nn.Tanh())
    getattr(reference, register)(hook)
    wrapped = burnish.torch.wrap(copy.deepcopy(reference), x)
    torch.testing.assert_close(wrapped(x), reference(x))
    wrapped[1].eval()
    torch.testing.assert_close(wrapped(x), reference(x))
    program = burnish.compile(reference, example_inputs=x, loss="mse")
    with burnish.Session(program, threads=1) as session:
        found = torch.from_numpy(session.predict({"input": x.numpy()})["output"])
    torch.testing.assert_close(found, reference.eval()(x))


def test_a_hook_that_computes_a_weight_is_read_at_each_call():
    torch.manual_seed(0)
    reference = nn.utils.spectral_norm(nn.Linear(4, 3)).double()
    module = nn.utils.spectral_norm(nn.Linear(4, 3)).double()
    module.load_state_dict(reference.state_dict())
    wrapped, x = burnish.torch.wrap(module, torch.randn(2, 4, dtype=torch.float64)), torch.randn(5, 4, dtype=torch.float64)
    for _ in range(3):
        gradients = []
        for each in (wrapped, reference):
            each.zero_grad()
            y = each(x)
            y.square().sum().backward()
            gradients.append([y.detach(), *(parameter.grad.clone() for parameter in each.parameters())])
        torch.testing.assert_close(*gradients)


@pytest.mark.slow
def test_an_example_may_have_a_gradient_and_a_normalization_may_be_the_module():
    x = torch.randn(4, 3, requires_grad=True)
    nn.Linear(3, 2)(x).sum().backward()
    reference = nn.BatchNorm1d(3)
    wrapped = burnish.torch.wrap(copy.deepcopy(reference), x)
    torch.testing.assert_close(wrapped(x), reference(x))
    torch.testing.assert_close(wrapped.state_dict(), reference.state_dict())


@pytest.mark.slow
def test_a_checkpoint_around_a_compiled_part_saves_as_much_when_it_runs_again():
    torch._dynamo.reset()
    reference = nn.Sequential(nn.Linear(4, 3), nn.Tanh())
    gradients = []
    for part in (torch.compile(copy.deepcopy(reference), backend="burnish"), reference):
        x = torch.ones(2, 4, requires_grad=True)
        torch.utils.checkpoint.checkpoint(part, x, use_reentrant=False).sum().backward()
        gradients.append(x.grad)
    torch.testing.assert_close(*gradients)


@pytest.mark.slow
def test_autocast_over_a_part_without_products_computes_as_pytorch():
    torch._dynamo.reset()
    x = torch.randn(3, 4)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y = torch.compile(nn.LayerNorm(4), backend="burnish")(x)
    torch.testing.assert_close(y, nn.LayerNorm(4)(x))
