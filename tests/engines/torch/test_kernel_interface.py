"""Operators of C++ get their arguments from PyTorch, and give their results, errors and tensors back."""

import pytest
import torch

from burnish.engines.torch.native import build_library
from burnish.kernels.compiling import find_compiler

SCHEMAS = (
    "interface_echo(Tensor[] tensors, Tensor? added, float[] constants, int[] numbers, float factor, int number, bool flag)"
    " -> (Tensor, Tensor)",
    "interface_list(Tensor x, int count) -> Tensor[]",
    "interface_flag(Tensor x) -> bool",
    "interface_count(Tensor x) -> int",
    "interface_half(Tensor x, float value) -> float",
    "interface_write(Tensor(a!) x, float value) -> ()",
    "interface_read(Tensor x, int axis) -> Tensor",
    "interface_part(Tensor x) -> Tensor",
)
SOURCE = r"""
#include "operators.h"

namespace burnish {
namespace {

std::tuple<Tensor, Tensor> echo(const std::vector<Tensor>& tensors, const std::optional<Tensor>& added,
                                const std::vector<double>& constants, const std::vector<int64_t>& numbers, double factor,
                                int64_t number, bool flag) {
  Tensor told = make_tensor({8}, kDouble);
  double* values = told.mutable_data_ptr<double>();
  values[0] = tensors.size();
  values[1] = added.has_value() ? added->numel() : -1;
  values[2] = constants.size() ? constants.back() : 0;
  values[3] = numbers.size() ? numbers.back() : 0;
  values[4] = factor;
  values[5] = number;
  values[6] = flag;
  values[7] = tensors.size() ? tensors.back().size(-1) : -1;
  return {told, tensors.empty() ? told : tensors[0]};
}

std::vector<Tensor> list(const Tensor& x, int64_t count) { return std::vector<Tensor>(count, x); }

bool flag(const Tensor& x) { return x.is_contiguous(); }

int64_t count(const Tensor& x) { return -x.numel(); }

double half(const Tensor&, double value) { return value / 2; }

void write(const Tensor& x, double value) { x.mutable_data_ptr<float>()[0] = static_cast<float>(value); }

Tensor read(const Tensor& x, int64_t axis) {
  BURNISH_CHECK(x.size(axis) > 2, "extent ", x.size(axis), " of axis ", axis, ": more expected");
  return to_contiguous(x);
}

Tensor part(const Tensor& x) { return as_strided(x, {1, 2}, {1, 2}); }

}  // namespace

BURNISH_OPERATORS(CPU) {
  operators.implement<&echo>("interface_echo");
  operators.implement<&list>("interface_list");
  operators.implement<&flag>("interface_flag");
  operators.implement<&count>("interface_count");
  operators.implement<&half>("interface_half");
  operators.implement<&write>("interface_write");
  operators.implement<&read>("interface_read");
  operators.implement<&part>("interface_part");
}

}  // namespace burnish
"""


@pytest.fixture(scope="module")
def operators(tmp_path_factory):
    if find_compiler() is None:
        pytest.skip("needs a C++ compiler")
    folder = tmp_path_factory.mktemp("interface")
    (folder / "interface.cpp").write_text(SOURCE)
    library = torch.library.Library("burnish", "FRAGMENT")
    for schema in SCHEMAS:
        library.define(schema)
    torch.ops.load_library(str(build_library(folder / "interface.cpp")))
    yield torch.ops.burnish
    library._destroy()


@pytest.mark.slow
def test_arguments_of_every_kind_arrive(operators):
    tensors = [torch.zeros(2, 3), torch.zeros(4, 5)]
    told, first = operators.interface_echo(tensors, torch.zeros(7), [0.5, -1.25], [3, -(2**40)], 1e-300, -6, True)
    assert told.tolist() == [2, 7, -1.25, -(2**40), 1e-300, -6, 1, 5]
    assert first.data_ptr() == tensors[0].data_ptr()


@pytest.mark.slow
def test_what_is_missing_is_missing(operators):
    told, _ = operators.interface_echo([torch.zeros(2)], None, [], [], 0.0, 0, False)
    assert told.tolist() == [1, -1, 0, 0, 0, 0, 0, 2]


def test_results_of_every_kind_return(operators):
    x = torch.randn(3, 4)
    assert [item.data_ptr() for item in operators.interface_list(x, 3)] == [x.data_ptr()] * 3
    assert operators.interface_list(x, 0) == []
    assert operators.interface_flag(x) is True
    assert operators.interface_flag(x.t()) is False
    assert operators.interface_count(x) == -x.numel()
    assert operators.interface_half(x, 0.25) == 0.125
    assert operators.interface_write(x, 0.1) is None
    assert x[0, 0] == torch.tensor(0.1)
    assert torch.equal(operators.interface_read(x.t(), 0), x.t())
    assert operators.interface_read(x.t(), 0).is_contiguous()


def test_views_begin_where_their_tensor_does(operators):
    x = torch.arange(12.0)
    view = operators.interface_part(x[3:])
    assert view.tolist() == [[3.0, 5.0]]
    assert view.data_ptr() == x[3:].data_ptr()


def test_tensors_are_given_back(operators):
    x = torch.randn(3, 4)
    before = x._use_count()
    for _ in range(3):
        operators.interface_echo([x, x], x, [], [], 0.0, 0, False)
        operators.interface_list(x, 5)
        operators.interface_read(x, 1)
        with pytest.raises(RuntimeError):
            operators.interface_read(x, 2)
    assert x._use_count() == before


def test_errors_say_what_was_wrong(operators):
    with pytest.raises(RuntimeError, match=r"^extent 2 of axis -1: more expected$"):
        operators.interface_read(torch.zeros(3, 2), -1)
    with pytest.raises(RuntimeError, match="a tensor of 1 axes has no axis 3"):
        operators.interface_read(torch.zeros(4), 3)
    with pytest.raises(RuntimeError, match="elements of PyTorch's type number 6 expected, found 7"):
        operators.interface_write(torch.zeros(4, dtype=torch.float64), 1.0)
