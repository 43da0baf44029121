"""A module becomes a graph that computes what it does, with its names, and with what ONNX does not keep beside it."""

from dataclasses import dataclass

import numpy as np
import pytest
import torch
from torch import nn

import burnish
import burnish.torch
from burnish.errors import FixedBatchWarning, UnsupportedOperatorError
from burnish.importer.pytorch import ExportedModule, export_module


class Convolutional(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.convolution = nn.Conv2d(1, 4, 3, bias=False)
        self.average = nn.BatchNorm2d(4, momentum=None)
        self.plain = nn.BatchNorm2d(4, affine=False, momentum=0.2)
        self.still = nn.BatchNorm2d(4)
        self.dropout = nn.Dropout2d(0.5)
        self.head = nn.Linear(4, 3)

    def forward(self, image: torch.Tensor) -> torch.Tensor:
        y = self.still(self.plain(self.average(self.convolution(image))))
        return self.head(self.dropout(torch.relu(y)).mean((2, 3)))


@pytest.fixture(scope="module")
def convolutional() -> tuple[nn.Module, ExportedModule]:
    torch.manual_seed(0)
    module = Convolutional()
    module.still.eval()
    return module, export_module(module, (torch.randn(1, 1, 6, 6),))


@pytest.mark.slow
def test_names_and_dimensions_are_those_of_the_module(convolutional):
    module, exported = convolutional
    graph = exported.model.graph
    assert [(value.name, str(value.shape)) for value in graph.inputs] == [("image", "[batch,1,6,6]")]
    assert [value.name for value in graph.outputs] == ["output"]
    expected = {name for name in module.state_dict() if not name.endswith("num_batches_tracked")}
    assert set(graph.initializers) == expected
    assert exported.inference is None


@pytest.mark.slow
def test_what_each_normalization_does_is_kept(convolutional):
    assert convolutional[1].norm_policies == {
        "average": "train:momentum=cumulative",
        "plain": "train:momentum=0.8",
        "still": "frozen",
    }
    assert convolutional[1].counted_batches == {"average.num_batches_tracked": 0, "plain.num_batches_tracked": 0}


@pytest.mark.slow
def test_the_module_is_left_as_it_was():
    module = Convolutional()
    module.still.eval()
    before = {name: tensor.clone() for name, tensor in module.state_dict().items()}
    export_module(module, (torch.randn(2, 1, 6, 6),))
    assert all(torch.equal(before[name], tensor) for name, tensor in module.state_dict().items())
    assert (module.training, module.still.training, module.average.momentum) == (True, False, None)
    assert "forward" not in module.__dict__


def test_weights_are_copies(convolutional):
    module, exported = convolutional
    tensor = exported.model.graph.initializers["head.weight"].const_value
    assert not np.shares_memory(tensor.numpy(), module.head.weight.detach().numpy())


@pytest.mark.slow
def test_predictions_are_those_of_evaluation(convolutional):
    module, exported = convolutional
    program = burnish.compile(exported.model)
    image = torch.randn(5, 1, 6, 6)
    session = burnish.Session(program, engine="reference")
    with torch.no_grad():
        expected = module.eval()(image)
    module.train()
    module.still.eval()
    np.testing.assert_allclose(session.predict({"image": image.numpy()})["output"], expected.numpy(), atol=1e-6)


@dataclass
class Answer:
    logits: torch.Tensor
    hidden: tuple[torch.Tensor, ...]
    note: str = "kept"


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(5, 4)
        self.words = nn.Embedding(6, 4, padding_idx=2)
        self.head = nn.Linear(4, 5, bias=False)
        self.head.weight = self.embedding.weight
        self.scale = nn.Parameter(torch.ones(4), requires_grad=False)
        self.register_buffer("table", torch.arange(4.0), persistent=False)

    def forward(self, tokens: torch.Tensor, *, words: torch.Tensor, mask: torch.Tensor | None = None) -> Answer:
        hidden = self.embedding(tokens) * self.scale + self.words(words) + self.table
        return Answer(self.head(hidden), (hidden, tokens))


@pytest.mark.slow
def test_structures_of_inputs_and_outputs():
    tokens = torch.tensor([[0, 1, 4]])
    exported = export_module(Tied(), (tokens,), {"words": torch.tensor([[1, 2, 3]]), "mask": None})
    assert exported.inputs.names == ("tokens", "words", None)
    assert [value.name for value in exported.model.graph.outputs] == ["logits", "hidden_0", "hidden_1"]
    answer = exported.outputs.unflatten({"logits": 1, "hidden_0": 2, "hidden_1": 3})
    assert answer == Answer(1, (2, 3))
    assert exported.inputs.flatten(((1,), {"words": 2, "mask": None})) == {"tokens": 1, "words": 2}
    assert exported.inputs.unflatten({"tokens": 1, "words": 2}) == ((1,), {"words": 2, "mask": None})


@pytest.mark.slow
def test_what_trains_and_what_is_shared():
    tokens = torch.tensor([[0, 1, 4]])
    exported = export_module(Tied(), (tokens,), {"words": tokens})
    assert exported.parameters == {"scale": False, "embedding.weight": True, "words.weight": True}
    assert exported.buffers == {"table": False}
    assert exported.shared == {"embedding.weight": ("head.weight",)}
    assert exported.held_rows == {"words.weight": [2]}
    assert set(exported.model.graph.initializers) == {"scale", "embedding.weight", "words.weight", "table"}


class Noisy(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x * 2 if self.training else x)


@pytest.mark.slow
def test_a_module_that_computes_something_else_in_evaluation_has_two_graphs():
    exported = export_module(Noisy(), (torch.ones(2, 3),))
    assert exported.inference is not None
    assert [node.op_type for node in exported.model.graph if node.op_type == "Mul"] == ["Mul"]
    assert not [node for node in exported.inference.graph if node.op_type == "Mul"]


class Counting(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 2)
        self.register_buffer("calls", torch.zeros(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls.add_(1)
        return self.layer(x) + self.calls


@pytest.mark.slow
def test_a_buffer_that_forward_changes_is_an_input_and_its_next_value_an_output():
    exported = export_module(Counting(), (torch.ones(2, 3),))
    assert (exported.moving, exported.written) == (("calls",), {"calls": "next:calls"})
    assert [value.name for value in exported.model.graph.inputs] == ["x", "calls"]
    assert [value.name for value in exported.model.graph.outputs] == ["output", "next:calls"]
    assert exported.inference is None


@pytest.mark.slow
def test_a_program_of_a_module_that_changes_a_buffer_is_refused_by_its_name():
    with pytest.raises(UnsupportedOperatorError, match="forward changes the buffer 'calls'"):
        burnish.load(Counting(), example_inputs=(torch.ones(2, 3),))


class FixedBatch(nn.Module):
    """Takes two samples, or whatever number it is made with."""

    def __init__(self, samples: int) -> None:
        super().__init__()
        self.samples = samples
        self.head = nn.Linear(6, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(x.reshape(self.samples, 6))


@pytest.mark.slow
@pytest.mark.parametrize("samples", [1, 4])
def test_a_batch_that_forward_fixes_is_warned_of(samples: int) -> None:
    with pytest.warns(
        FixedBatchWarning, match=f"FixedBatch takes batches of {samples} alone: .* reshape\\({samples}, .* batch_first=True"
    ):
        exported = export_module(FixedBatch(samples), (torch.randn(samples, 2, 3),))
    assert list(exported.model.graph.inputs[0].shape) == [samples, 2, 3]


@pytest.mark.slow
def test_a_fixed_batch_that_is_asked_for_is_no_surprise(recwarn: pytest.WarningsRecorder) -> None:
    export_module(FixedBatch(4), (torch.randn(4, 6),), dynamic_shapes={})
    assert not [warning for warning in recwarn if warning.category is FixedBatchWarning]


class Scaled(nn.Module):
    """Has a factor that no gradient reaches."""

    def __init__(self, factor: nn.Module) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3)
        self.factor = factor

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            factor = self.factor(self.linear(x))
        return self.linear(x) * factor.detach()


@pytest.mark.slow
@pytest.mark.parametrize("factor", [nn.Dropout(0.5), nn.BatchNorm1d(3)])
def test_what_stops_gradients_needs_no_graph_of_its_own_for_evaluation(factor: nn.Module) -> None:
    exported = export_module(Scaled(factor), (torch.randn(4, 3),))
    assert exported.inference is None
    assert any(node.op_type == "StopGradient" for node in exported.model.graph)
    assert list(exported.norm_policies) == (["factor"] if isinstance(factor, nn.BatchNorm1d) else [])


class Copying(nn.Module):
    """Computes with a copy of its weight."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(3, 3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ self.weight.clone()


@pytest.mark.slow
def test_a_copy_of_a_parameter_is_the_parameter() -> None:
    model = burnish.load(Copying(), example_inputs=(torch.randn(4, 3),))
    assert list(model.graph.initializers) == ["weight"]


class Keyword(nn.Module):
    """Takes whatever else it is given by name, as models of transformers do."""

    def forward(self, x: torch.Tensor, weights: torch.Tensor | None = None, **others: torch.Tensor) -> torch.Tensor:
        return x * others["factor"] + others.get("shift", 0)


@pytest.mark.slow
@pytest.mark.parametrize("shapes", [None, {"x": {0: torch.export.Dim("batch")}, "shift": {0: torch.export.Dim("batch")}}])
def test_the_batch_is_open_of_what_a_module_takes_by_any_name(shapes):
    inputs = {"x": torch.ones(2, 3), "shift": torch.ones(2, 3), "factor": torch.tensor(2.0)}
    if shapes is not None:
        shapes = shapes | {"factor": None}
    exported = export_module(Keyword(), (), inputs, shapes)
    assert [(value.name, list(value.shape)) for value in exported.model.graph.inputs] == [
        ("x", ["batch", 3]),
        ("shift", ["batch", 3]),
        ("factor", []),
    ]


@pytest.mark.slow
@pytest.mark.parametrize("scale", [None, 8**-0.5, 0.3, 0.5])
def test_the_scale_of_attention_has_all_digits_in_float64(scale):
    class Attention(nn.Module):
        def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
            return nn.functional.scaled_dot_product_attention(q, k, v, scale=scale)

    q, k, v = (torch.randn(2, 2, 5, 8, generator=torch.Generator().manual_seed(seed), dtype=torch.float64) for seed in range(3))
    model = burnish.load(Attention(), example_inputs=(q, k, v))
    found = burnish.engines.get("reference").run(model, {"q": q.numpy(), "k": k.numpy(), "v": v.numpy()})
    np.testing.assert_allclose(found["output"], Attention()(q, k, v), rtol=1e-13, atol=1e-14)


class Doubled(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.ops.burnish_tests.doubled(x)


@pytest.mark.slow
def test_a_composite_operator_that_comes_after_an_export_is_decomposed():
    x = torch.randn(3, 2)
    export_module(nn.ReLU(), (x,))
    library = torch.library.Library("burnish_tests", "FRAGMENT")
    library.define("doubled(Tensor x) -> Tensor")
    library.impl("doubled", lambda x: x * 2, "CompositeImplicitAutograd")
    exported = export_module(Doubled(), (x,))
    assert [node.op_type for node in exported.model.graph if node.op_type != "Constant"] == ["Mul"]


class Split(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        first, second = x.chunk(2)
        return first.sum(0) - second.split(2)[0].square().sum(0)


@pytest.mark.slow
def test_parts_along_the_batch_are_differentiated_for_any_batch():
    module = Split()
    wrapped = burnish.torch.wrap(module, (torch.randn(8, 3),))
    for samples in (6, 7, 8):
        x = torch.randn(samples, 3, requires_grad=True)
        found, wanted = wrapped(x), module(x)
        torch.testing.assert_close(found, wanted)
        gradients = [torch.autograd.grad(y.prod(), x)[0] for y in (found, wanted)]
        torch.testing.assert_close(*gradients)


def test_an_input_that_a_translation_returns_keeps_its_name():
    class Summed(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x.logsumexp(0)

    exported = export_module(Summed(), (torch.tensor(2.0),))
    assert [value.name for value in exported.model.graph.inputs] == ["x"]


def test_running_statistics_that_are_arguments_are_named():
    class Normalized(nn.Module):
        def forward(self, x: torch.Tensor, mean: torch.Tensor, variance: torch.Tensor) -> torch.Tensor:
            return nn.functional.batch_norm(x, mean, variance, training=True)

    with pytest.raises(UnsupportedOperatorError, match="writes its running statistics to 'mean', which is no buffer"):
        export_module(Normalized(), (torch.randn(4, 3), torch.zeros(3), torch.ones(3)))
