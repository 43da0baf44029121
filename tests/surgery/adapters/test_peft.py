"""Adapters beside those of PEFT: the same gradients and steps, and files in both directions."""

from __future__ import annotations

import functools

import numpy as np
import onnxruntime
import pytest
import torch

import burnish
from burnish import surgery
from burnish.analysis.adapters import read_adapters
from burnish.formats.peft import in_layout_of_peft
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


@pytest.mark.parametrize(("name", "variant"), CASES)
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
