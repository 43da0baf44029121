"""What cannot be exported is refused with the line of the user's code and the part of the module."""

import importlib
import re

import pytest
import torch
from torch import nn

import burnish
from burnish.errors import ConfigurationError, UnsupportedOperatorError
from burnish.importer.pytorch import export_module


class Branching(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if x.sum() > 0:
            return x * 2
        return x


class Decomposing(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.linalg.svd(x)[0]


class Leaving(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tensor(x.detach().numpy())


class Reversed(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: torch.Tensor) -> torch.Tensor:
        return x * 2

    @staticmethod
    def backward(ctx, gradient: torch.Tensor) -> torch.Tensor:
        return -gradient


class Reversing(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return Reversed.apply(x)


class Packing(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        packed = nn.utils.rnn.pack_padded_sequence(x[..., None], torch.full((2,), 3), batch_first=True)
        return nn.utils.rnn.pad_packed_sequence(packed)[0]


class Normalizing(nn.Module):
    """PyTorch has this layer as a function of its own with a backward of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.across = nn.CrossMapLRN2d(3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.across(x[..., None, None])


class Filtering(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.response = nn.Parameter(torch.ones(2, dtype=torch.complex64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.fft.irfft(torch.fft.rfft(x) * self.response, n=3)


class Network(nn.Module):
    def __init__(self, part: nn.Module):
        super().__init__()
        self.first = nn.Linear(3, 3)
        self.blocks = nn.ModuleList([part])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.blocks[0](self.first(x))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("part", "line", "reason"),
    [
        (Branching, "if x.sum() > 0:", "data-dependent expression"),
        (Decomposing, "return torch.linalg.svd(x)[0]", "No ONNX function found for .*_linalg_svd"),
        (Leaving, "return torch.tensor(x.detach().numpy())", r"\.numpy\(\) is not supported"),
        (
            Packing,
            "packed = nn.utils.rnn.pack_padded_sequence(x[..., None], torch.full((2,), 3), batch_first=True)",
            "by the values",
        ),
        (Reversing, "return Reversed.apply(x)", r"the torch\.autograd\.Function Reversed has a backward of its own"),
    ],
)
def test_the_line_and_the_part_are_named(part, line, reason, capfd):
    module = Network(part())
    message = rf"Network cannot be exported at .*test_refused_modules\.py:\d+ \({re.escape(line)}\), in the part 'blocks\.0' "
    with pytest.raises(
        UnsupportedOperatorError, match=message + rf"\({part.__name__}\): .*{reason}.*Leave 'blocks\.0' to PyTorch"
    ):
        burnish.compile(module, example_inputs=torch.randn(2, 3))
    assert "def forward" not in capfd.readouterr().err  # PyTorch's print of the graph, which can have thousands of lines
    assert "apply" in torch.autograd.Function.__dict__
    assert torch.equal(Reversed.apply(torch.ones(2)), torch.full((2,), 2.0))


@pytest.mark.slow
def test_the_parts_are_named_of_a_module_that_branches_itself():
    class Whole(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.encoder, self.head = nn.Linear(3, 3), nn.Linear(3, 1)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.head(self.encoder(x)) if x.sum() > 0 else x

    with pytest.raises(
        UnsupportedOperatorError, match=r"test_refused_modules\.py.*its parts are: encoder, head\. Or let burnish"
    ):
        burnish.compile(Whole(), example_inputs=torch.randn(2, 3))


@pytest.mark.slow
def test_the_line_of_a_library_is_named_where_the_module_is_one_of_its(tmp_path, monkeypatch):
    library = tmp_path / "site-packages" / "branching_library.py"
    library.parent.mkdir()
    library.write_text(
        "import torch\n\n\n"
        "class Branching(torch.nn.Linear):\n"
        "    def forward(self, x):\n"
        "        return super().forward(x) if x.sum() > 0 else x\n"
    )
    monkeypatch.syspath_prepend(library.parent)
    module = importlib.import_module("branching_library").Branching(3, 3)
    with pytest.raises(
        UnsupportedOperatorError, match=r"at .*branching_library\.py:6 \(return super.* if x\.sum\(\) > 0 else x\)"
    ):
        burnish.compile(module, example_inputs=torch.randn(2, 3))


@pytest.mark.slow
def test_a_layer_of_pytorch_with_a_backward_of_its_own_is_refused():
    message = r"the torch\.autograd\.Function CrossMapLRN2d has a backward of its own, and a graph would not"
    with pytest.raises(UnsupportedOperatorError, match=message):
        burnish.load(Normalizing(), example_inputs=torch.randn(2, 3))


@pytest.mark.slow
def test_complex_parameters_are_refused_with_what_to_hold_in_their_place():
    with pytest.raises(UnsupportedOperatorError, match=r"'response' is complex, and .* read it by torch\.view_as_complex"):
        burnish.load(Filtering(), example_inputs=torch.randn(2, 3))


@pytest.mark.slow
def test_running_statistics_of_instances_are_refused():
    module = nn.Sequential(nn.Conv1d(2, 3, 1), nn.InstanceNorm1d(3, track_running_stats=True))
    with pytest.raises(UnsupportedOperatorError, match="the instance normalization '1' keeps running statistics"):
        burnish.load(module, example_inputs=torch.randn(2, 2, 5))


def test_examples_that_pytorch_refuses_too() -> None:
    with pytest.raises(
        ConfigurationError, match=r"example_inputs: PyTorch cannot call Sequential with them either .*Give inputs"
    ):
        export_module(nn.Sequential(nn.Linear(4, 3)), (torch.randn(2, 5),))
