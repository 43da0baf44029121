"""Batch normalization converted to other normalizations: PyTorch's numbers on ONNX Runtime, names, training, errors."""

from __future__ import annotations

import numpy as np
import onnx
import onnx_ir as ir
import pytest
import torch
from onnx import TensorProto, helper, numpy_helper
from torch import nn
from torch.nn import functional

import burnish
from burnish.errors import ConfigurationError
from oracles.onnxruntime_outputs import onnxruntime_outputs
from torch_models import ResNet, export_onnx

torch.set_num_threads(1)
CHANNELS = 6


def one_layer(
    positions: tuple[int, ...], dtype: type = np.float32, channels: int = CHANNELS, epsilon: float = 1e-3
) -> onnx.ModelProto:
    """A batch normalization of [batch, channels, *positions], and its operands random."""
    rng = np.random.default_rng(channels)
    arrays = {
        name: rng.uniform(0.3, 2, channels).astype(dtype)
        for name in ("bn.weight", "bn.bias", "bn.running_mean", "bn.running_var")
    }
    element = helper.np_dtype_to_tensor_dtype(np.dtype(dtype))
    shape = ["batch", channels, *positions]
    graph = helper.make_graph(
        [helper.make_node("BatchNormalization", ["x", *arrays], ["y"], epsilon=epsilon)],
        "g",
        [helper.make_tensor_value_info("x", element, shape)],
        [helper.make_tensor_value_info("y", element, shape)],
        [numpy_helper.from_array(array, name) for name, array in arrays.items()],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=8)


def array(model: ir.Model, name: str) -> np.ndarray:
    tensor = model.graph.initializers[name].const_value
    assert tensor is not None
    return tensor.numpy()


def expected(x: np.ndarray, to: str, scale: np.ndarray, bias: np.ndarray, epsilon: float) -> np.ndarray:
    """PyTorch's in float64."""
    groups = {"layer": 1, "instance": x.shape[1]}.get(to) or int(to.partition(":")[2])
    wide = (torch.from_numpy(value.astype(np.float64)) for value in (x, scale, bias))
    x_wide, scale_wide, bias_wide = wide
    return functional.group_norm(x_wide, groups, scale_wide, bias_wide, epsilon).numpy()


# Groups of a single number have no variance.
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize(
    ("to", "positions"),
    [
        (to, positions)
        for to in ("group:1", "group:2", "group:3", "group:6", "layer", "instance")
        for positions in ((), (5,), (4, 3), (2, 3, 2))
        if positions or to not in ("group:6", "instance")
    ],
)
def test_outputs_are_pytorchs(to: str, positions: tuple[int, ...], dtype: type) -> None:
    proto = one_layer(positions, dtype)
    x = np.random.default_rng(1).normal(3, 2, (4, CHANNELS, *positions)).astype(dtype)
    model = burnish.surgery.convert(proto, to)
    onnx.checker.check_model(ir.to_proto(model), full_check=True)
    assert set(model.graph.initializers) == {"bn.weight", "bn.bias"}
    for name in ("bn.weight", "bn.bias"):
        np.testing.assert_array_equal(
            array(model, name), numpy_helper.to_array(next(t for t in proto.graph.initializer if t.name == name))
        )
    y = onnxruntime_outputs(model, {"x": x})["y"]
    reference = expected(x, to, array(model, "bn.weight"), array(model, "bn.bias"), float(np.float32(1e-3)))
    assert np.linalg.norm(y - reference) <= (5e-7 if dtype is np.float32 else 1e-14) * np.linalg.norm(reference)


def test_digits_survive_a_large_mean() -> None:
    """The standard's GroupNormalization loses every digit here on ONNX Runtime."""
    x = np.random.default_rng(2).normal(2000, 1, (2, CHANNELS, 16, 16)).astype(np.float32)
    model = burnish.surgery.convert(one_layer((16, 16)), "group:2")
    y = onnxruntime_outputs(model, {"x": x})["y"]
    reference = expected(x, "group:2", array(model, "bn.weight"), array(model, "bn.bias"), 1e-3)
    assert np.linalg.norm(y - reference) <= 1e-4 * np.linalg.norm(reference)


def converted_module(module: nn.Module, to: str) -> nn.Module:
    """Replace every BatchNorm2d of a PyTorch module by the GroupNorm of the same scale and bias."""
    for name, child in module.named_children():
        if isinstance(child, nn.BatchNorm2d):
            channels = child.num_features
            groups = {"layer": 1, "instance": channels}.get(to) or int(to.partition(":")[2])
            layer = nn.GroupNorm(groups, channels, child.eps)
            layer.load_state_dict({"weight": child.weight, "bias": child.bias})
            setattr(module, name, layer)
        else:
            converted_module(child, to)
    return module


@pytest.mark.slow
@pytest.mark.parametrize("to", ["group:4", "layer", "instance"])
def test_a_converted_network_trains_like_pytorchs(to: str) -> None:
    torch.manual_seed(0)
    module = ResNet((1,), 8, 5)
    for layer in module.modules():
        if isinstance(layer, nn.BatchNorm2d):
            nn.init.uniform_(layer.weight, 0.5, 1.5)
            nn.init.normal_(layer.bias, std=0.3)
    model = burnish.surgery.convert(export_onnx(module, torch.zeros(2, 3, 32, 32)), to)
    session = burnish.Session(burnish.compile(model, optimizer=burnish.optim.sgd(lr=0.1)))
    module = converted_module(module, to).train()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    rng = np.random.default_rng(0)
    assert not any(name.startswith("stat/") for name in session.state())
    for _ in range(3):
        x = rng.normal(size=(4, 3, 32, 32)).astype(np.float32)
        labels = rng.integers(0, 5, 4)
        loss = functional.cross_entropy(module(torch.from_numpy(x)), torch.from_numpy(labels))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        assert session.step({"x": x, "labels": labels})["loss"] == pytest.approx(loss.item(), rel=1e-4)
    state = session.state()
    for name, parameter in module.named_parameters():
        wanted = parameter.detach().numpy()
        assert np.linalg.norm(state[f"param/{name}"] - wanted) <= 1e-4 * np.linalg.norm(wanted), name


@pytest.mark.slow
@pytest.mark.parametrize("to", ["group:4", "layer", "instance"])
def test_a_converted_network_starts_from_scratch(to: str) -> None:
    model = burnish.surgery.convert(export_onnx(ResNet((1,), 8, 5), torch.zeros(2, 3, 32, 32)), to)
    state = burnish.compile(model).initial_state(reinitialize="kaiming")
    np.testing.assert_array_equal(state["param/bn1.weight"], np.ones(8))
    np.testing.assert_array_equal(state["param/bn1.bias"], np.zeros(8))


def test_only_the_layers_that_are_named() -> None:
    model = burnish.surgery.convert(
        export_onnx(ResNet((1,), 8, 5), torch.zeros(2, 3, 32, 32)), "group:4", layers=["bn1", "stages.*.bn2"]
    )
    kinds = [node.op_type for node in model.graph]
    assert kinds.count("LayerNormalization") == 2
    assert kinds.count("BatchNormalization") == 3
    assert "bn1.running_mean" not in model.graph.initializers
    assert "stages.0.0.bn1.running_mean" in model.graph.initializers


def test_the_source_is_left_as_it_is() -> None:
    source = burnish.load(one_layer((4,)))
    burnish.surgery.convert(source, "layer")
    assert [node.op_type for node in source.graph] == ["BatchNormalization"]
    assert "bn.running_mean" in source.graph.initializers


def test_groups_that_do_not_divide() -> None:
    message = r"layer 'bn' has 48 channels, which 32 groups do not divide.*are 24 and 48\. Choose one of them"
    with pytest.raises(ConfigurationError, match=message):
        burnish.surgery.convert(one_layer((4,), channels=48), "group:32")
    with pytest.raises(ConfigurationError, match=r"6 channels, which 7 groups do not divide.*that do are 6\."):
        burnish.surgery.convert(one_layer((4,)), "group:7")


CHOICE = "choose among group, instance, layer"


@pytest.mark.parametrize(
    ("to", "message"),
    [
        ("batch", f"there is no normalization 'batch'; {CHOICE}"),
        ("", f"there is no normalization ''; {CHOICE}"),
        (None, f"a normalization is a name, not None; {CHOICE}"),
        (32, f"a normalization is a name, not 32; {CHOICE}"),
        ("group", "normalization 'group' needs the option 'groups': give it"),
        ("group:", "normalization 'group:': no settings stand after the colon"),
        ("group:0", "convert: groups must be a whole number of 1 or more, such as 'group:32', not 0"),
        ("group:-2", "convert: groups must be .* not -2"),
        ("group:two", "convert: groups must be .* not 'two'"),
        ("layer:2", "normalization 'layer' has no option '2'; it takes none"),
    ],
)
def test_unknown_normalizations(to: object, message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        burnish.surgery.convert(one_layer((4,)), to)  # type: ignore[arg-type]


@pytest.mark.parametrize(("to", "positions"), [("instance", ()), ("group:6", ()), ("instance", (1, 1))])
def test_a_single_element_per_group(to: str, positions: tuple[int, ...]) -> None:
    with pytest.raises(ConfigurationError, match=r"'bn' normalizes \[N, 6\] without positions: with 6 groups .*single\s+element"):
        burnish.surgery.convert(one_layer(positions), to)


def test_a_pattern_without_a_match() -> None:
    with pytest.raises(ConfigurationError, match=r"layers: 'head\.\*' matches no batch normalization layer.*are: 'bn'"):
        burnish.surgery.convert(one_layer((4,)), "layer", layers="head.*")
    with pytest.raises(ConfigurationError, match="layers must be a name or pattern"):
        burnish.surgery.convert(one_layer((4,)), "layer", layers=[])


def test_a_model_without_batch_normalization() -> None:
    graph = helper.make_graph(
        [helper.make_node("Relu", ["x"], ["y"])],
        "g",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, [2])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, [2])],
    )
    with pytest.raises(ConfigurationError, match=r"no batch normalization layer to replace.*burnish\.surgery\.insert"):
        burnish.surgery.convert(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=8), "layer")


def test_running_statistics_that_the_model_reads() -> None:
    proto = one_layer((4,))
    node = proto.graph.node[0]
    node.output.extend(["mean", "variance"])
    node.attribute.append(helper.make_attribute("training_mode", 1))
    proto.graph.output.append(helper.make_tensor_value_info("mean", TensorProto.FLOAT, [CHANNELS]))
    with pytest.raises(ConfigurationError, match=r"reads the running statistics that BatchNormalization.*remove those outputs"):
        burnish.surgery.convert(proto, "layer")
