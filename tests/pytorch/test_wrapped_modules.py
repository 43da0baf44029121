"""Wrapped modules beside PyTorch: outputs, gradients, running statistics, in training and then in evaluation."""

from __future__ import annotations

import copy
import functools
import inspect
import pickle
import threading
import types
from collections.abc import Callable

import pytest
import torch
from torch import nn

import burnish.torch
from burnish.errors import ConfigurationError, HooksWarning, InputError
from burnish.torch import module_graphs
from oracles.pytorch_modules import MODULES, ModuleCase, tensors_of

pytest.importorskip("onnxscript", reason="PyTorch exports modules by onnxscript")

BATCHES = (3, 2)
STEPS = 4


def generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def call(module: nn.Module, case: ModuleCase, inputs: dict[str, torch.Tensor]) -> list[torch.Tensor]:
    return tensors_of(module(**inputs) if case.by_name else module(*inputs.values()))


def pair(name: str, dtype: torch.dtype = torch.float64) -> tuple[nn.Module, nn.Module, ModuleCase]:
    """A wrapped module, the same in PyTorch, and its case."""
    case = MODULES[name]
    torch.manual_seed(0)
    module = case.build().to(dtype)
    for part in module.modules():
        if hasattr(part, "eps"):
            part.eps = 2.0**-17  # ONNX holds float32 alone
    reference = copy.deepcopy(module)
    examples = converted(case.inputs(2, generator(7)), dtype)
    return burnish.torch.wrap(module, examples if case.by_name else tuple(examples.values())), reference, case


def converted(inputs: dict[str, torch.Tensor], dtype: torch.dtype) -> dict[str, torch.Tensor]:
    return {name: tensor.to(dtype) if tensor.is_floating_point() else tensor for name, tensor in inputs.items()}


def weighted(outputs: list[torch.Tensor]) -> torch.Tensor:
    """A scalar of all outputs, with cotangents that are random and signed."""
    return sum((y * torch.randn(y.shape, generator=generator(5), dtype=y.dtype)).sum() for y in outputs)


@pytest.mark.slow
@pytest.mark.parametrize("name", MODULES)
def test_a_wrapped_module_is_the_module_in_float64(name):
    wrapped, reference, case = pair(name)
    optimizers = [torch.optim.SGD(module.parameters(), lr=0.05, momentum=0.9) for module in (wrapped, reference)]
    for seed, batch in enumerate(BATCHES):
        gradients = []
        for module, optimizer in zip((wrapped, reference), optimizers, strict=True):
            inputs = case.inputs(batch, generator(seed))
            leaves = [tensor.requires_grad_() for tensor in inputs.values() if tensor.is_floating_point()]
            optimizer.zero_grad()
            outputs = call(module, case, inputs)
            weighted(outputs).backward()
            gradients.append([*outputs, *(leaf.grad for leaf in leaves), *(p.grad for p in module.parameters())])
            optimizer.step()
        for found, wanted in zip(*gradients, strict=True):
            torch.testing.assert_close(found, wanted, rtol=case.relative, atol=0.1 * case.relative)
    state = wrapped.state_dict()
    assert state.keys() == reference.state_dict().keys()
    for entry, wanted in reference.state_dict().items():
        torch.testing.assert_close(state[entry], wanted, rtol=case.relative, atol=0.1 * case.relative, msg=entry)
    inputs = case.inputs(3, generator(9))
    for found, wanted in zip(call(wrapped.eval(), case, inputs), call(reference.eval(), case, inputs), strict=True):
        torch.testing.assert_close(found, wanted, rtol=case.relative, atol=0.1 * case.relative)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["residual", "vision_transformer", "recurrent"])
def test_steps_in_float32_follow_pytorch(name):
    wrapped, reference, case = pair(name, torch.float32)
    exact = copy.deepcopy(reference).double()
    losses: list[list[float]] = [[], [], []]
    for module, found, dtype in zip(
        (wrapped, reference, exact), losses, (torch.float32, torch.float32, torch.float64), strict=True
    ):
        optimizer = torch.optim.AdamW(module.parameters(), lr=1e-3)
        for seed in range(STEPS):
            optimizer.zero_grad()
            loss = weighted(call(module, case, converted(case.inputs(4, generator(seed)), dtype)))
            loss.backward()
            optimizer.step()
            found.append(loss.item())
    for ours, theirs, true in zip(*losses, strict=True):
        assert abs(ours - true) <= 2 * abs(theirs - true) + 2e-5 * max(1.0, abs(true))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["perceptron", "residual"])
def test_gradients_are_those_of_differences_and_can_be_differentiated_again(name):
    wrapped, _, case = pair(name)
    wrapped.eval()
    inputs = [tensor[:2].requires_grad_() for tensor in case.inputs(2, generator(0)).values()]
    parameters = list(wrapped.parameters())[-2:]
    assert torch.autograd.gradcheck(lambda *leaves: wrapped(*leaves[: len(inputs)]), (*inputs, *parameters), fast_mode=True)
    assert torch.autograd.gradgradcheck(lambda *leaves: wrapped(*leaves[: len(inputs)]), (*inputs, *parameters), fast_mode=True)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["residual", "recurrent", "unet"])
def test_a_penalty_on_gradients_is_differentiated_as_by_pytorch(name):
    """As in a GAN: the gradient of the norm of a gradient, through batch normalization in training and recurrence."""
    wrapped, reference, case = pair(name)
    found = []
    for module in (wrapped, reference):
        inputs = case.inputs(3, generator(0))
        parameters = list(module.parameters())
        outputs = call(module, case, inputs)
        first = torch.autograd.grad(weighted([y.tanh() for y in outputs]), parameters, create_graph=True)
        found.append(torch.autograd.grad(sum(g.square().sum() for g in first), parameters))
    for ours, theirs in zip(*found, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-7, atol=1e-9)


class Stopped(nn.Module):
    """The gradient does not flow through a part of the product."""

    def __init__(self, detaches: bool):
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.detaches = detaches

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.linear(x)
        if self.detaches:
            return h * torch.tanh(h).detach()
        with torch.no_grad():
            factor = torch.tanh(h)
        return h * factor


@pytest.mark.slow
@pytest.mark.parametrize("detaches", [True, False])
def test_no_gradient_flows_where_the_module_stops_it_nor_a_second_one(detaches):
    module = Stopped(detaches).double()
    wrapped = burnish.torch.wrap(copy.deepcopy(module), torch.randn(3, 4, dtype=torch.float64))
    found = []
    for model in (wrapped, module):
        x = torch.randn(3, 4, generator=generator(0), dtype=torch.float64, requires_grad=True)
        first = torch.autograd.grad(weighted([model(x)]), [x, *model.parameters()], create_graph=True)
        second = torch.autograd.grad(first[0].square().sum(), model.linear.weight)
        found.append([*first, *second])
    for ours, theirs in zip(*found, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-10)


@pytest.mark.slow
def test_what_is_returned_shares_everything_with_the_module():
    module = MODULES["residual"].build()
    parameters = dict(module.named_parameters())
    wrapped = burnish.torch.wrap(module, torch.randn(2, 1, 8, 8))
    assert isinstance(wrapped, type(module))
    assert all(parameter is parameters[name] for name, parameter in wrapped.named_parameters())
    wrapped.eval()
    assert not module.training
    assert torch.allclose(wrapped(torch.ones(2, 1, 8, 8)), module(torch.ones(2, 1, 8, 8)), atol=1e-5)
    assert type(burnish.torch.unwrap(wrapped)) is type(module)
    with pytest.raises(ConfigurationError, match="is wrapped already"):
        burnish.torch.wrap(wrapped, torch.randn(2, 1, 8, 8))
    with pytest.raises(ConfigurationError, match="is not wrapped"):
        burnish.torch.unwrap(module)


@pytest.mark.slow
def test_submodules_that_change_their_mode_or_are_replaced_are_seen():
    wrapped, reference, case = pair("residual")
    inputs = case.inputs(3, generator(0))

    def agree() -> None:
        torch.testing.assert_close(call(wrapped, case, inputs), call(reference, case, inputs), rtol=1e-9, atol=1e-10)
        for name, wanted in reference.state_dict().items():
            torch.testing.assert_close(wrapped.state_dict()[name], wanted, rtol=1e-9, atol=1e-10, msg=name)

    agree()
    for module in (wrapped, reference):
        module[1].eval()
    agree()
    torch.manual_seed(1)
    head = nn.Linear(6, 2).double()
    wrapped[-1], reference[-1] = head, copy.deepcopy(head)
    agree()
    for module in (wrapped, reference):
        module.to(torch.float32)
    found, wanted = (call(module, case, converted(inputs, torch.float32)) for module in (wrapped, reference))
    torch.testing.assert_close(found, wanted)


@pytest.mark.slow
def test_a_copy_and_a_pickled_module_are_apart_and_compute_the_same():
    wrapped, _, case = pair("perceptron")
    inputs = case.inputs(3, generator(0))
    copied, read = copy.deepcopy(wrapped), pickle.loads(pickle.dumps(wrapped))
    for other in (copied, read):
        assert type(other) is type(wrapped)
        torch.testing.assert_close(call(other, case, inputs), call(wrapped, case, inputs), rtol=0, atol=0)
        with torch.no_grad():
            other[0].weight.add_(1.0)
        assert not torch.equal(call(other, case, inputs)[0], call(wrapped, case, inputs)[0])


@pytest.mark.slow
def test_parameters_that_do_not_train_and_tied_ones():
    wrapped, reference, case = pair("language_model")
    inputs = case.inputs(2, generator(0))
    for module in (wrapped, reference):
        module.qkv.weight.requires_grad_(False)
        weighted(call(module, case, inputs)).backward()
    assert wrapped.qkv.weight.grad is None
    assert wrapped.head.weight is wrapped.embedding.weight
    torch.testing.assert_close(wrapped.head.weight.grad, reference.head.weight.grad, rtol=1e-9, atol=1e-10)


@pytest.mark.slow
def test_the_row_of_padding_gets_no_gradient():
    wrapped, _, case = pair("recurrent")
    weighted(call(wrapped, case, {"tokens": torch.zeros(2, 6, dtype=torch.int64)})).backward()
    assert not wrapped.embedding.weight.grad.any()


@pytest.mark.slow
def test_a_single_value_per_channel_is_refused_in_training_as_in_pytorch():
    module = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))
    wrapped = burnish.torch.wrap(module, torch.randn(4, 3))
    before = module[1].running_mean.clone()
    with pytest.raises(InputError, match=r"has 1 along axis 0, and batch normalization '1' needs 2 or more: a single value"):
        wrapped(torch.randn(1, 3))
    assert torch.equal(module[1].running_mean, before)
    assert wrapped(torch.randn(2, 3)).shape == (2, 4)
    assert wrapped.eval()(torch.randn(1, 3)).shape == (1, 4)


@pytest.mark.slow
def test_a_cumulative_average_of_statistics_counts_batches():
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3, momentum=None)).double()
    reference = copy.deepcopy(module)
    wrapped = burnish.torch.wrap(module, torch.randn(4, 4, dtype=torch.float64))
    for seed in range(3):
        x = torch.randn(5, 4, generator=generator(seed), dtype=torch.float64)
        wrapped(x), reference(x)
    assert wrapped[1].num_batches_tracked == 3
    torch.testing.assert_close(wrapped[1].running_var, reference[1].running_var, rtol=1e-9, atol=1e-10)


@pytest.mark.slow
def test_hooks_of_parameters_and_of_the_whole_run_and_those_of_submodules_are_warned_of():
    module = MODULES["perceptron"].build()
    seen: list[str] = []
    module.register_forward_hook(lambda *_: seen.append("forward"))
    module.register_full_backward_hook(lambda *_: seen.append("backward"))
    module[0].weight.register_hook(lambda gradient: gradient * 0)
    module[0].register_forward_hook(lambda *_: None)
    with pytest.warns(HooksWarning, match=r"submodules have hooks: '0'\. They run while the module is exported"):
        wrapped = burnish.torch.wrap(module, torch.randn(2, 4))
    seen.clear()
    wrapped(torch.randn(2, 4, requires_grad=True)).sum().backward()
    assert seen == ["forward", "backward"]
    assert not module[0].weight.grad.any()


@pytest.mark.slow
def test_calls_in_threads_each_have_their_own_values():
    wrapped, reference, case = pair("vision_transformer")
    batches = [case.inputs(3, generator(seed))["x"] for seed in range(4)]
    found: dict[int, torch.Tensor] = {}

    def gradient(module: Callable[..., torch.Tensor], x: torch.Tensor) -> torch.Tensor:
        leaf = x.clone().requires_grad_()
        return torch.autograd.grad(weighted([module(leaf)]), leaf)[0]

    threads = [threading.Thread(target=lambda i=i: found.update({i: gradient(wrapped, batches[i])})) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for index, x in enumerate(batches):
        torch.testing.assert_close(found[index], gradient(reference, x), rtol=1e-9, atol=1e-10)


@pytest.mark.slow
def test_under_autocast_gradients_are_as_near_as_those_of_pytorch():
    wrapped, reference, case = pair("residual", torch.float32)
    exact = copy.deepcopy(reference)
    inputs = converted(case.inputs(4, generator(0)), torch.float32)
    weighted(call(exact, case, inputs)).backward()
    with torch.autocast("cpu", torch.bfloat16):
        for module in (wrapped, reference):
            weighted([y.float() for y in call(module, case, inputs)]).backward()
    errors = [
        sum((p.grad - q.grad).norm() / q.grad.norm() for p, q in zip(module.parameters(), exact.parameters(), strict=True))
        for module in (wrapped, reference)
    ]
    assert 0 < errors[0] < 2 * errors[1]
    assert all(parameter.grad.dtype == torch.float32 for parameter in wrapped.parameters())


@pytest.mark.slow
def test_arguments_may_be_given_by_name_and_others_are_refused():
    module = MODULES["structured"].build().double()
    inputs = MODULES["structured"].inputs(2, generator(0))
    wrapped = burnish.torch.wrap(module, inputs)
    by_name, by_position = wrapped(**inputs), wrapped(*inputs.values())
    assert torch.equal(by_name["loss"], by_position["loss"])
    with pytest.raises(ConfigurationError, match="missing a required argument: 'labels'"):
        wrapped(inputs["a"], inputs["b"])
    with pytest.raises(ConfigurationError, match=r"'a' is torch.float32, and the graph 'Structured' computes with torch.float64"):
        wrapped(**(inputs | {"a": inputs["a"].float()}))


class Scaled(nn.Linear):
    """Its factor and its labels may be left out."""

    def forward(self, x: torch.Tensor, factor: float = 1.0, labels: torch.Tensor | None = None) -> dict[str, torch.Tensor]:
        logits = super().forward(x) * factor
        return {"logits": logits} if labels is None else {"loss": nn.functional.mse_loss(logits, labels), "logits": logits}


@pytest.mark.parametrize("dynamic_shapes", [None, {"x": {0: torch.export.Dim("batch")}, "factor": None}])
@pytest.mark.slow
def test_other_arguments_than_those_of_the_examples_are_exported_for_once(dynamic_shapes, monkeypatch):
    exports = []
    export = module_graphs.export_module
    monkeypatch.setattr(
        module_graphs, "export_module", lambda *given, **options: exports.append(given) or export(*given, **options)
    )
    module = Scaled(2, 2)
    wrapped = burnish.torch.wrap(module, (torch.ones(2, 2), 3.0), dynamic_shapes=dynamic_shapes)
    for batch in (3, 4):
        x, labels = torch.randn(batch, 2), torch.randn(batch, 2)
        for arguments in ({"factor": 3.0}, {"factor": 2.0}, {}, {"labels": labels}, {"factor": 2.0, "labels": labels}):
            found, wanted = wrapped(x, **arguments), burnish.torch.unwrap(wrapped)(x, **arguments)
            assert found.keys() == wanted.keys()
            for name, tensor in found.items():
                torch.testing.assert_close(tensor, wanted[name])
    assert len(exports) == 5


@pytest.mark.slow
def test_a_number_that_is_another_at_each_call_is_to_be_a_tensor():
    wrapped = burnish.torch.wrap(Scaled(2, 2), (torch.ones(2, 2), 0.0))
    for factor in range(1, module_graphs.MOST_STRUCTURES + 1):
        wrapped(torch.ones(3, 2), float(factor))
    with pytest.raises(ConfigurationError, match=r"wrapped with 0.0 where it is called with 9.0.*or give it as a tensor"):
        wrapped(torch.ones(3, 2), 9.0)


@pytest.mark.slow
def test_what_is_assigned_to_forward_is_called_and_leaves_the_module_as_it_is():
    """As accelerate does for mixed precision, and takes away again by ``__wrapped__`` down to the innermost."""
    module = MODULES["perceptron"].build()
    wrapped = burnish.torch.wrap(module, torch.ones(2, 4))
    own, seen = wrapped.forward, []

    @functools.wraps(own.__func__)
    def forward(self: nn.Module, *args: torch.Tensor) -> torch.Tensor:
        seen.append(self)
        return own(*args)

    wrapped.forward = types.MethodType(forward, wrapped)
    wrapped(torch.ones(2, 4)), burnish.torch.unwrap(wrapped)(torch.ones(2, 4))
    assert seen == [wrapped]
    assert "forward" not in module.__dict__
    innermost = wrapped.forward
    while hasattr(innermost, "__wrapped__"):
        innermost = innermost.__wrapped__
    assert innermost is own.__func__
    del wrapped.forward
    assert wrapped.forward == own
    wrapped.__class__ = type("Sharded", (type(wrapped),), {})  # as fully_shard does
    wrapped.forward = types.MethodType(forward, wrapped)
    wrapped(torch.ones(2, 4))
    assert len(seen) == 2


@pytest.mark.slow
def test_a_wrapped_module_is_told_by_its_name_and_signature_as_the_module_is():
    """Trainers choose columns of data by the signature, and losses by the name, which is also written beside weights."""
    module = Scaled(2, 2)
    wrapped = burnish.torch.wrap(module, (torch.ones(2, 2), 3.0))
    assert type(wrapped).__name__ == wrapped._get_name() == "Scaled"
    assert inspect.signature(wrapped.forward) == inspect.signature(module.forward)
    assert inspect.signature(type(wrapped).forward) == inspect.signature(Scaled.forward)
    assert repr(wrapped) == "Scaled(in_features=2, out_features=2, bias=True, computed by burnish)"


def test_a_module_with_a_forward_of_its_own_is_refused():
    module = MODULES["perceptron"].build()
    module.forward = lambda x: x
    with pytest.raises(ConfigurationError, match="has a forward that is not its class's"):
        burnish.torch.wrap(module, torch.ones(2, 4))
