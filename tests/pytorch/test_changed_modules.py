"""What is changed in a module after it was wrapped: the next call computes with it, as PyTorch does."""

from __future__ import annotations

import copy
import types
from collections.abc import Callable

import pytest
import torch
from torch import nn

import burnish
import burnish.torch
from burnish.errors import ConfigurationError, HooksWarning, UnsupportedOperatorError
from burnish.torch import module_graphs

pytest.importorskip("onnxscript", reason="PyTorch exports modules by onnxscript")

DTYPE = torch.float64


class Layers(nn.Module):
    """A layer twice, two that share a weight, and an attribute that nothing reads."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.act, self.drop = nn.BatchNorm1d(3, eps=2.0**-17), nn.LeakyReLU(0.125), nn.Dropout(0.0)
        self.first, self.second = nn.Linear(3, 3), nn.Linear(3, 3, bias=False)
        self.second.weight = self.first.weight
        self.head = nn.Sequential(nn.Linear(3, 2))
        self.unread = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.norm(self.act(self.first(self.norm(x))))
        return self.head(self.drop(self.second(x)))


def batch(seed: int = 0) -> torch.Tensor:
    return torch.randn(4, 3, generator=torch.Generator().manual_seed(seed), dtype=DTYPE)


@pytest.fixture(scope="module")
def made() -> nn.Module:
    torch.manual_seed(0)
    return burnish.torch.wrap(Layers().to(DTYPE), batch())


@pytest.fixture
def exports(monkeypatch: pytest.MonkeyPatch) -> list[nn.Module]:
    seen: list[nn.Module] = []
    export = module_graphs.export_module
    monkeypatch.setattr(
        module_graphs, "export_module", lambda module, *rest, **options: seen.append(module) or export(module, *rest, **options)
    )
    return seen


def agree(module: nn.Module, reference: nn.Module) -> None:
    for part in (module, reference):
        part.zero_grad()
        part(batch(1)).pow(3).sum().backward()
    found, wanted = (dict(part.named_parameters()) for part in (module, reference))
    assert found.keys() == wanted.keys()
    for name, parameter in wanted.items():
        torch.testing.assert_close(found[name].grad, parameter.grad, rtol=1e-9, atol=1e-10, msg=name)
    for name, buffer in reference.named_buffers():
        torch.testing.assert_close(dict(module.named_buffers())[name], buffer, rtol=1e-9, atol=1e-10, msg=name)


CHANGES: dict[str, Callable[[nn.Module], object]] = {
    "attributes": lambda m: (setattr(m.act, "negative_slope", 0.5), setattr(m.norm, "momentum", 0.5), setattr(m.drop, "p", 1.0)),
    "a shared weight of its own": lambda m: setattr(m.second, "weight", nn.Parameter(torch.eye(3, dtype=DTYPE))),
    "a bias less": lambda m: setattr(m.first, "bias", None),
    "a bias more": lambda m: setattr(m.second, "bias", nn.Parameter(torch.ones(3, dtype=DTYPE))),
    "a part more": lambda m: m.head.append(nn.Tanh()),
}


@pytest.mark.parametrize(
    "change", [name if name == "attributes" else pytest.param(name, marks=pytest.mark.slow) for name in CHANGES]
)
@pytest.mark.slow
def test_the_next_call_computes_with_what_was_changed(made: nn.Module, change: str) -> None:
    module = copy.deepcopy(made)
    reference = copy.deepcopy(burnish.torch.unwrap(module))
    agree(module, reference)
    for part in (module, reference):
        CHANGES[change](part)
    copied = copy.deepcopy(module)
    agree(module, reference)
    if change == "attributes":
        torch.testing.assert_close(copied(batch(1)), module(batch(1)), rtol=1e-9, atol=1e-10)


WIDTH = 1


class Reading(nn.Module):
    """Reads numbers from all places that Python has, and a tensor that is no buffer."""

    scale = 2

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.options, self.shift = nn.Linear(3, 2), {"slope": 1}, torch.ones(2)
        self.config, self.order = types.SimpleNamespace(power=2), ["sum"]
        self.register_buffer("table", torch.ones(4, 2))

    def forward(self, x: torch.Tensor, kind: object = 1) -> torch.Tensor:
        y = self.layer(x) * self.scale * self.options["slope"] + self.shift * self.table.shape[0]
        y = y * WIDTH * (10 if kind is True else 1)
        return y**self.config.power if self.order[0] == "sum" else -y


READ: dict[str, Callable[[pytest.MonkeyPatch, Reading], object]] = {
    "an attribute of the class": lambda patch, m: patch.setattr(Reading, "scale", 3),
    "an entry of a dictionary": lambda patch, m: m.options.update(slope=3),
    "an attribute of an object": lambda patch, m: setattr(m.config, "power", 3),
    "a variable": lambda patch, m: patch.setitem(globals(), "WIDTH", 3),
    "an entry of a list": lambda patch, m: m.order.insert(0, "minus"),
    "a hook": lambda patch, m: m.layer.register_forward_hook(lambda part, args, output: output * 3),
    "a tensor": lambda patch, m: m.shift.mul_(3),
    "the shape of a buffer": lambda patch, m: setattr(m, "table", torch.ones(5, 2)),
}


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::burnish.errors.HooksWarning")
@pytest.mark.parametrize("what", READ)
def test_what_forward_reads_is_seen_to_change(what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    module = burnish.torch.wrap(Reading(), torch.randn(4, 3), verify=False)
    x = torch.randn(2, 3)
    before = module(x)
    READ[what](monkeypatch, module)
    wanted = burnish.torch.unwrap(module)(x)
    torch.testing.assert_close(module(x), wanted)
    assert not torch.allclose(before, wanted)


@pytest.mark.slow
def test_one_is_not_true() -> None:
    module = burnish.torch.wrap(Reading(), (torch.randn(4, 3), 1), verify=False)
    x = torch.randn(2, 3)
    torch.testing.assert_close(module(x, True), burnish.torch.unwrap(module)(x, True))


def test_a_hook_that_a_part_gets_is_warned_of() -> None:
    module = burnish.torch.wrap(nn.Sequential(nn.Linear(3, 2)), torch.randn(4, 3), verify=False)
    module[0].register_full_backward_hook(lambda *_: None)
    with pytest.warns(HooksWarning, match="submodules have hooks: '0'"):
        module(torch.randn(4, 3))


class Outside(nn.Module):
    """Has layers in a list, which PyTorch trains, and does not know as parts."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = [nn.Linear(3, 3)]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers[0](x)


class Recording(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * (2 if torch.is_grad_enabled() else 3)


@pytest.mark.parametrize(
    ("module", "reason"),
    [
        (Outside(), r"forward reads 'layers\[0\].weight', a tensor of the shape \[3, 3\], which requires a gradient"),
        (Recording(3, 2), r"forward asks whether gradients are recorded \(torch.is_grad_enabled\)"),
    ],
)
def test_what_would_be_a_constant_is_refused_by_its_name(module: nn.Module, reason: str) -> None:
    with pytest.raises(UnsupportedOperatorError, match=reason):
        burnish.torch.wrap(module, torch.randn(4, 3))


@pytest.mark.parametrize("way", ["wrap", "compile"])
def test_layers_without_a_shape_are_refused(way: str) -> None:
    module, x = nn.Sequential(nn.LazyLinear(2)), torch.randn(4, 3)
    with pytest.raises(ConfigurationError, match=r"'0.weight' has no shape yet.*call the module once with the examples"):
        burnish.torch.wrap(module, x) if way == "wrap" else burnish.compile(module, example_inputs=(x,))


@pytest.mark.slow
def test_an_attribute_that_the_graph_does_not_depend_on_costs_one_export(made: nn.Module, exports: list[nn.Module]) -> None:
    module = copy.deepcopy(made)
    module(batch())
    exports.clear()
    for step in range(1, 12):
        module.unread = step
        module(batch())
    assert len(exports) == 1


@pytest.mark.slow
def test_an_attribute_that_is_another_at_each_call_is_to_be_a_tensor(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module_graphs, "MOST_STRUCTURES", 1)
    module = burnish.torch.wrap(nn.Sequential(nn.LeakyReLU(0.5)), torch.ones(2))
    module[0].negative_slope = 0.25
    assert float(module(-torch.ones(2)).sum()) == -0.5
    module[0].negative_slope = 0.125
    message = r"'0.negative_slope' of Sequential has changed 2 times since the module was wrapped.*or hold it in a buffer"
    with pytest.raises(ConfigurationError, match=message):
        module(-torch.ones(2))


@pytest.mark.filterwarnings("ignore:weights of one value")
@pytest.mark.slow
def test_a_layer_that_runs_twice_counts_two_batches_in_a_program_too() -> None:
    torch.manual_seed(0)
    module = Layers()
    program = burnish.compile(module, example_inputs=(torch.randn(4, 3),), loss="cross_entropy", metrics=())
    with burnish.Session(program) as session:
        for _ in range(3):
            session.step({"x": batch().float().numpy(), "labels": [0, 1, 1, 0]})
        burnish.torch.load_into(module, session)
    assert int(module.norm.num_batches_tracked) == 6


def test_an_average_over_all_batches_that_one_call_adds_two_to_is_refused() -> None:
    norm = nn.BatchNorm1d(3, momentum=None)
    message = r"averages its running statistics over all batches \(momentum=None\), and one call of the module runs it 2 times"
    with pytest.raises(UnsupportedOperatorError, match=message):
        burnish.torch.wrap(nn.Sequential(norm, nn.ReLU(), norm), torch.randn(4, 3))


@pytest.mark.slow
def test_a_layer_under_two_names_counts_each_use() -> None:
    norm = nn.BatchNorm1d(3)
    burnish.torch.wrap(nn.Sequential(norm, nn.ReLU(), norm), torch.randn(4, 3))(torch.randn(4, 3))
    assert int(norm.num_batches_tracked) == 2


@pytest.mark.parametrize("value", [None, [1.0, 2.0, 3.0], torch.ones(4, 3).numpy()], ids=["none", "list", "array"])
def test_what_is_no_tensor_is_refused_by_its_name(made: nn.Module, value: object) -> None:
    with pytest.raises(ConfigurationError, match=r"'x' is of the type \w+, and the graph 'Layers' takes a tensor there"):
        copy.deepcopy(made)(value)
