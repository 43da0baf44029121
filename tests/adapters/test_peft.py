"""Adapters beside those of PEFT: the same gradients and steps, and files in both directions."""

from __future__ import annotations

import functools

import numpy as np
import onnx
import onnxruntime
import pytest
import torch

import burnish
from burnish import surgery
from burnish.adapters.graph import read_adapters
from burnish.adapters.peft_format import in_layout_of_peft
from burnish.errors import ConfigurationError
from oracles.combinations import spread
from oracles.peft_models import Adaptable, adaptable

STEPS = 10
OPTIONS = {"lora": {"lora_alpha": 6, "r": 3}, "dora": {"lora_alpha": 6, "r": 3, "use_dora": True}, "ia3": {}}


def adapted_by_peft(source: Adaptable, variant: str):
    """A module with PEFT's adapters, all of them moved away from where they begin."""
    peft = pytest.importorskip("peft")
    if variant == "ia3":
        configuration = peft.IA3Config(target_modules=list(source.adapted), feedforward_modules=list(source.feedforward))
    else:
        configuration = peft.LoraConfig(target_modules=[*source.adapted, *source.tables], **OPTIONS[variant])
    torch.manual_seed(1)
    module = peft.get_peft_model(source.fresh(), configuration)
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            if parameter.requires_grad:
                parameter.add_(0.2 * torch.randn_like(parameter) * (1 if "magnitude" not in name else 0.1))
    return module.eval()


def trained_names(module) -> dict[str, torch.Tensor]:
    """The parameters that train, as the file of PEFT calls them."""
    peft = pytest.importorskip("peft")
    arrays = peft.get_peft_model_state_dict(module, save_embedding_layers=False)
    return {name.removeprefix("base_model.model."): array for name, array in arrays.items()}


def in_peft(source: Adaptable, session: burnish.Session, folder) -> dict[str, np.ndarray]:
    """The adapters of a session, as a file of PEFT has them."""
    from safetensors.numpy import load_file

    session.export(folder / "kept.onnx", adapters="kept")
    surgery.save_peft(folder / "kept.onnx", folder / "peft", names=lambda name: name.removeprefix("model."))
    return {
        name.removeprefix("base_model.model."): array
        for name, array in load_file(folder / "peft" / "adapter_model.safetensors").items()
    }


def gradients(program: burnish.Program, feeds: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """The gradients of the adapters, called and laid out as parameters of PEFT."""
    state = program.initial_state()
    inputs = {entry.name: feeds.get(entry.name, state.get(entry.name)) for entry in program.signature["grad"].inputs}
    session = onnxruntime.InferenceSession(burnish.graph.model_proto(program.grad).SerializeToString())
    names = [output.name for output in session.get_outputs() if output.name.startswith("grad:")]
    arrays = {name.removeprefix("grad:"): array for name, array in zip(names, session.run(names, inputs), strict=True)}
    adapters = read_adapters(program.metadata).adapters
    assert {name for adapter in adapters for name in adapter.parameters.values()} == arrays.keys()
    return {
        name.removeprefix("model."): in_layout_of_peft(adapter, part, arrays[name])
        for adapter in adapters
        for part, name in adapter.parameters.items()
    }


def padded_column(module) -> torch.Tensor:
    """What the lookup of the padding's index adds, which PyTorch never trains."""
    return next(p for name, p in module.named_parameters() if "lora_embedding_A" in name).data[:, 0]


@functools.cache
def read(name: str, variant: str, folder):
    """A module of PEFT, and the model that reads its file."""
    source = adaptable(name)
    module = adapted_by_peft(source, variant)
    module.save_pretrained(folder, save_embedding_layers=False)
    return source, module, surgery.load_peft(source.model, folder)


MAIN = [("bert", "lora"), ("llama", "lora"), ("convolutional", "dora")]
CASES = [
    pytest.param(name, variant, marks=pytest.mark.slow if (name, variant) in MAIN else pytest.mark.campaign)
    for name in ("bert", "llama", "convolutional")
    for variant in OPTIONS
]


@spread(("name", "variant"), CASES, test_all=1)
def test_gradients_and_steps_are_those_of_peft(name, variant, tmp_path):
    source, module, model = read(name, variant, tmp_path)
    feeds = source.batch()
    held = {f"model.{source.padded}.lora_embedding_A": [0]} if source.padded and variant != "ia3" else None
    program = burnish.compile(model, loss=source.loss, optimizer="adamw:lr=0.01,weight_decay=0.1", hold_rows=held)
    session = burnish.Session(program)
    logits = source.torch_logits(module, feeds).detach().numpy()
    np.testing.assert_allclose(next(iter(session.predict(feeds).values())), logits, rtol=1e-4, atol=1e-5)

    source.torch_loss(module, feeds).backward()
    expected = {
        parameter_name.replace("base_model.model.", "").replace(".default", "").replace("vector.weight", "vector"): parameter.grad
        for parameter_name, parameter in module.named_parameters()
        if parameter.requires_grad
    }
    computed = gradients(program, feeds)
    assert computed.keys() == expected.keys()
    for key, gradient in expected.items():
        scale = gradient.abs().max().item()
        np.testing.assert_allclose(computed[key], gradient.numpy(), rtol=1e-4, atol=1e-5 * scale, err_msg=key)

    before = session.state()
    optimizer = torch.optim.AdamW([p for p in module.parameters() if p.requires_grad], lr=0.01, weight_decay=0.1)
    frozen_row = None if held is None else padded_column(module).clone()
    for _ in range(STEPS):
        optimizer.zero_grad()
        loss = source.torch_loss(module, feeds)
        loss.backward()
        optimizer.step()
        if frozen_row is not None:  # AdamW decays what padding_idx gives no gradient; burnish holds it
            padded_column(module).copy_(frozen_row)
        assert session.step(feeds)["loss"] == pytest.approx(loss.item(), rel=1e-4)
    ours, theirs = in_peft(source, session, tmp_path), trained_names(module)
    assert ours.keys() == theirs.keys()
    for key, array in theirs.items():
        np.testing.assert_allclose(ours[key], array.detach().numpy(), rtol=1e-4, atol=1e-4, err_msg=key)
    after = session.state()
    trained = {f"param/{name}" for name in program.options["trainable"]}
    still = [key for key in before if key.startswith("param/") and key not in trained]
    assert still
    assert all(before[key].tobytes() == after[key].tobytes() for key in still)


@pytest.mark.parametrize(("name", "variant"), CASES)
def test_files_and_merged_weights_give_the_same_outputs_in_both(name, variant, tmp_path):
    peft = pytest.importorskip("peft")
    source, _, model = read(name, variant, tmp_path)
    feeds = source.batch()
    session = burnish.Session(burnish.compile(model, loss=source.loss, optimizer="sgd:lr=0.1"))
    for _ in range(2):
        session.step(feeds)
    predicted = next(iter(session.predict(feeds).values()))
    in_peft(source, session, tmp_path)
    again = peft.PeftModel.from_pretrained(source.fresh(), tmp_path / "peft").eval()
    np.testing.assert_allclose(source.torch_logits(again, feeds).detach().numpy(), predicted, rtol=1e-4, atol=1e-5)
    merged = again.merge_and_unload()
    inputs = {source.input: feeds[source.input]}
    path = session.export(tmp_path / "merged.onnx")
    (exported,) = onnxruntime.InferenceSession(str(path)).run(None, inputs)
    np.testing.assert_allclose(exported, predicted, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(source.torch_logits(merged, feeds).detach().numpy(), exported, rtol=1e-4, atol=1e-5)

    apart = session.export(tmp_path / "apart.onnx", adapters="apart")
    run, options, adapter = onnxruntime.InferenceSession(str(apart)), onnxruntime.RunOptions(), onnxruntime.LoraAdapter()
    adapter.Load(str(apart.with_suffix(".onnx_adapter")))
    options.add_active_adapter(adapter)
    np.testing.assert_allclose(run.run(None, inputs, options)[0], predicted, rtol=1e-4, atol=1e-5)
    base = source.torch_logits(source.fresh(), feeds).detach().numpy()
    np.testing.assert_allclose(run.run(None, inputs)[0], base, rtol=1e-4, atol=1e-5)


class Scorer(torch.nn.Module):
    """An embedding, a layer that keeps its weight as [inputs, outputs], as those of GPT-2, and an output layer."""

    def __init__(self):
        super().__init__()
        layers = pytest.importorskip("transformers").pytorch_utils
        self.embed_tokens, self.mix = torch.nn.Embedding(11, 6), layers.Conv1D(6, 6)
        self.lm_head = torch.nn.Linear(6, 11, bias=False)

    def forward(self, ids):
        return self.lm_head(torch.tanh(self.mix(self.embed_tokens(ids))))

    def get_input_embeddings(self):
        return self.embed_tokens

    def get_output_embeddings(self):
        return self.lm_head


def scorer() -> tuple[Scorer, onnx.ModelProto]:
    """The module, and the file of it that PyTorch's older exporter writes where it is the part 'model' of another."""
    torch.manual_seed(0)
    module, helper = Scorer().eval(), onnx.helper
    arrays = {f"model.{name}": parameter.detach().numpy() for name, parameter in module.named_parameters()}
    arrays["onnx::MatMul_9"] = np.ascontiguousarray(arrays.pop("model.lm_head.weight").T)
    nodes = [
        helper.make_node("Gather", ["model.embed_tokens.weight", "ids"], ["rows"], "/model/embed_tokens/Gather"),
        helper.make_node("MatMul", ["rows", "model.mix.weight"], ["product"], "/model/mix/MatMul"),
        helper.make_node("Add", ["product", "model.mix.bias"], ["mixed"], "/model/mix/Add"),
        helper.make_node("Tanh", ["mixed"], ["bounded"], "/model/Tanh"),
        helper.make_node("MatMul", ["bounded", "onnx::MatMul_9"], ["logits"], "/model/lm_head/MatMul"),
    ]
    graph = helper.make_graph(
        nodes,
        "scorer",
        [helper.make_tensor_value_info("ids", onnx.TensorProto.INT64, ["n", 5])],
        [helper.make_tensor_value_info("logits", onnx.TensorProto.FLOAT, ["n", 5, 11])],
        [onnx.numpy_helper.from_array(array, name) for name, array in arrays.items()],
    )
    return module, helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=10)


def moved(folder, **settings) -> np.ndarray:
    """The logits of the module by PEFT, after all of its parameters moved away from where they began; its file is written."""
    peft = pytest.importorskip("peft")
    module = peft.get_peft_model(scorer()[0], peft.LoraConfig(r=2, lora_alpha=3, **settings)).eval()
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            if parameter.requires_grad or "embed_tokens.base_layer" in name:
                parameter.add_(0.3 * torch.randn_like(parameter))
    module.save_pretrained(folder)
    return module(IDS).detach().numpy()


IDS = torch.arange(10).reshape(2, 5)
WHOLE = {
    "the weights of adapted embeddings and output layers": {"target_modules": ["embed_tokens", "lm_head"]},
    "the biases of adapted layers": {"target_modules": ["mix"], "bias": "lora_only", "fan_in_fan_out": True},
    "the biases of other layers": {"target_modules": ["lm_head"], "bias": "all"},
    "a square weight as its module has it": {"target_modules": ["lm_head"], "modules_to_save": ["mix"]},
    "a head without a name in the file": {"target_modules": ["mix"], "modules_to_save": ["lm_head"], "fan_in_fan_out": True},
}


@pytest.mark.slow
@pytest.mark.parametrize("held", WHOLE)
def test_what_a_folder_holds_beside_adapters_is_read_and_written(held, tmp_path):
    peft = pytest.importorskip("peft")
    expected = moved(tmp_path / "theirs", **WHOLE[held])
    model = surgery.load_peft(scorer()[1], tmp_path / "theirs")
    run = onnxruntime.InferenceSession(burnish.graph.model_proto(model).SerializeToString())
    np.testing.assert_allclose(run.run(None, {"ids": IDS.numpy()})[0], expected, rtol=1e-4, atol=1e-5)
    assert not any("embed_tokens.weight" in name for name in burnish.compile(model, loss="mse").options["trainable"])

    surgery.save_peft(model, tmp_path / "ours", names=lambda name: name.removeprefix("model."))
    fresh = scorer()[0]
    if "embed_tokens" in WHOLE[held]["target_modules"]:  # the base is not written: it is the model's
        fresh.embed_tokens.weight.data = torch.tensor(model.graph.initializers["model.embed_tokens.weight"].const_value.numpy())
    again = peft.PeftModel.from_pretrained(fresh, tmp_path / "ours").eval()
    np.testing.assert_allclose(again(IDS).detach().numpy(), expected, rtol=1e-4, atol=1e-5)


def test_parts_of_adapters_that_burnish_does_not_have_are_refused_by_name(tmp_path):
    moved(tmp_path, target_modules=["mix"], trainable_token_indices={"embed_tokens": [1, 2]}, fan_in_fan_out=True)
    with pytest.raises(ConfigurationError, match=r"embed_tokens.*trainable_tokens_delta' is a part of an adapter that burnish"):
        surgery.load_peft(scorer()[1], tmp_path)


def test_two_weights_of_a_file_for_a_shared_one_are_refused(tmp_path):
    moved(tmp_path, target_modules=["embed_tokens", "lm_head"])
    model = scorer()[1]
    del model.graph.initializer[-1]
    model.graph.node.insert(0, onnx.helper.make_node("Transpose", ["model.embed_tokens.weight"], ["onnx::MatMul_9"], perm=[1, 0]))
    with pytest.raises(ConfigurationError, match=r"share the weight 'model.embed_tokens.weight'.*a weight for each"):
        surgery.load_peft(model, tmp_path)
