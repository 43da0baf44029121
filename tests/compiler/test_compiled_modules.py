"""What a PyTorch module says of its own training, and what the options of ``burnish.compile`` say otherwise."""

import copy
import warnings

import numpy as np
import pytest
import torch
from torch import nn

import burnish
import burnish.torch
from burnish.errors import ConfigurationError, ModelError


class Network(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(5, 4, padding_idx=0)
        self.norm = nn.BatchNorm1d(4, momentum=0.25)
        self.still = nn.BatchNorm1d(4)
        self.middle = nn.Linear(4, 4)
        self.temperature = nn.Parameter(torch.tensor(1.5))
        self.head = nn.Linear(4, 3)
        self.middle.weight.requires_grad_(False)
        self.register_buffer("table", torch.arange(4.0))

    def forward(self, word: torch.Tensor) -> torch.Tensor:
        y = self.still(self.norm(self.words(word) + self.table))
        return self.head(torch.relu(self.middle(y))) * self.temperature


def network() -> Network:
    torch.manual_seed(0)
    module = Network()
    module.still.eval()
    return module


@pytest.fixture(scope="module")
def program() -> burnish.Program:
    return burnish.compile(network(), example_inputs=(torch.tensor([1, 2, 0, 4]),), optimizer="sgd:lr=0.1")


@pytest.mark.slow
def test_what_trains_is_what_requires_a_gradient(program):
    trained = {"words.weight", "norm.weight", "norm.bias", "still.weight", "still.bias", "middle.bias", "temperature"}
    assert set(program.options["trainable"]) == trained | {"head.weight", "head.bias"}


def test_normalization_follows_the_mode_and_the_momentum_of_each_layer(program):
    assert program.options["norm_layers"] == {"norm": "train:momentum=0.75", "still": "frozen"}
    assert program.options["running_variance"] == "pytorch"


@pytest.mark.parametrize("engine", ["onnxruntime", "torch"])
def test_steps_follow_pytorch(program, engine):
    module = network()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    words, labels = torch.tensor([1, 2, 0, 4, 0]), torch.tensor([0, 2, 1, 1, 0])
    with burnish.Session(program, engine=engine) as session:
        for _ in range(3):
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(module(words), labels)
            loss.backward()
            optimizer.step()
            metrics = session.step({"word": words.numpy(), "labels": labels.numpy()})
            assert metrics["loss"] == pytest.approx(loss.item(), rel=1e-5)
        trained = network()
        burnish.torch.load_into(trained, session)
    for name, tensor in module.state_dict().items():
        np.testing.assert_allclose(trained.state_dict()[name], tensor, rtol=1e-4, atol=1e-6, err_msg=name)
    assert trained.norm.num_batches_tracked == 3
    assert torch.equal(trained.words.weight[0], network().words.weight[0])


@pytest.mark.slow
def test_options_say_otherwise():
    examples = (torch.tensor([1, 2, 0, 4]),)
    program = burnish.compile(network(), example_inputs=examples, trainable=["head.*", "words*"], norm={"norm": "frozen"})
    assert set(program.options["trainable"]) == {"head.weight", "head.bias", "words.weight"}
    assert program.options["norm_layers"] == {"norm": "frozen", "still": "frozen"}
    assert program.options["hold_rows"] == {"words.weight": [0]}


class TwoForms(nn.Module):
    """Adds noise in training, and gives probabilities beside in evaluation."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 2)
        self.auxiliary = nn.Linear(3, 2)

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        logits = self.layer(x)
        if self.training:
            return {"logits": logits + self.auxiliary(x)}
        return {"logits": logits, "probabilities": logits.softmax(-1)}


@pytest.mark.slow
def test_a_module_is_evaluated_in_the_form_that_it_has_there():
    torch.manual_seed(0)
    module = TwoForms()
    x, labels = torch.randn(4, 3), torch.tensor([0, 1, 1, 0])
    program = burnish.compile(module, example_inputs={"x": x}, outputs="logits")
    assert {"layer.weight", "auxiliary.weight"} <= set(program.options["trainable"])
    with burnish.Session(program, engine="onnxruntime") as session:
        batch = {"x": x.numpy(), "labels": labels.numpy()}
        evaluated, predicted, step = session.evaluate(batch), session.predict({"x": x.numpy()}), session.step(batch)
    expected = nn.functional.cross_entropy(module(x)["logits"], labels).item()
    assert step["loss"] == pytest.approx(expected, rel=1e-5)
    answer = module.eval()(x)
    assert evaluated["loss"] == pytest.approx(nn.functional.cross_entropy(answer["logits"], labels).item(), rel=1e-5)
    np.testing.assert_allclose(predicted["probabilities"], answer["probabilities"].detach(), atol=1e-6)


class WithoutItsOutput(TwoForms):
    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        if self.training:
            return super().forward(x)
        return {"first": x, "second": self.layer(x)}


@pytest.mark.slow
def test_an_output_that_evaluation_lacks_is_named():
    with pytest.raises(ConfigurationError, match=r"no output 'logits'.*That is so in evaluation, eval\(\)"):
        burnish.compile(WithoutItsOutput(), example_inputs={"x": torch.ones(2, 3)}, outputs="logits")


class LossInside(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 2)

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        logits = self.layer(x)
        return {"loss": nn.functional.cross_entropy(logits, labels), "logits": logits}


@pytest.mark.slow
def test_a_module_that_returns_its_loss():
    torch.manual_seed(0)
    module, x, labels = LossInside(), torch.randn(4, 3), torch.tensor([0, 1, 1, 0])
    program = burnish.compile(module, example_inputs={"x": x, "labels": labels}, output="loss")
    with burnish.Session(program, engine="onnxruntime") as session:
        step = session.step({"x": x.numpy(), "labels": labels.numpy()})
    assert step["loss"] == pytest.approx(module(x, labels)["loss"].item(), rel=1e-5)


@pytest.mark.slow
def test_dropout_draws_anew_in_each_step_and_not_in_evaluation():
    module = nn.Sequential(nn.Dropout(0.5), nn.Linear(8, 2, bias=False))
    program = burnish.compile(module, example_inputs=torch.ones(2, 8), optimizer="sgd:lr=0")
    batch = {"input": np.ones((4, 8), np.float32), "labels": np.zeros(4, np.int64)}
    with burnish.Session(program, engine="onnxruntime") as session:
        assert session.step(batch)["loss"] != session.step(batch)["loss"]
        assert session.evaluate(batch) == session.evaluate(batch)


@pytest.mark.slow
def test_load_gives_the_model_of_a_module():
    model = burnish.load(network(), example_inputs=(torch.tensor([1, 2]),))
    assert [value.name for value in model.graph.inputs] == ["word"]


def test_a_module_without_examples_is_refused():
    with pytest.raises(ConfigurationError, match=r"example_inputs: what does Network take\?"):
        burnish.compile(network())


def test_examples_without_a_module_are_refused(tmp_path):
    with pytest.raises(ConfigurationError, match=r"example_inputs and dynamic_shapes are for a torch\.nn\.Module"):
        burnish.compile(tmp_path / "model.onnx", example_inputs=(1,))


def test_what_is_no_model_is_refused_with_what_can_be():
    with pytest.raises(ModelError, match=r"from int: give the path .* or a torch\.nn\.Module"):
        burnish.load(3)


class Detached(nn.Module):
    """Values that pass no gradient on, and a table with padding whose other reader trains the padding's row, too."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(6, 4, padding_idx=0)
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)
        self.head = nn.Linear(4, 6, bias=False)
        self.head.weight = self.words.weight
        nn.init.normal_(self.words.weight)

    def forward(self, word: torch.Tensor) -> torch.Tensor:
        x = self.first(self.words(word))
        with torch.no_grad():
            gate = torch.tanh(x)
        return self.head(self.second(x) * gate + x.detach())


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["onnxruntime", "torch"])
def test_what_is_detached_passes_no_gradient(engine):
    torch.manual_seed(0)
    module, word, labels = Detached(), torch.tensor([1, 0, 3, 5]), torch.tensor([0, 2, 1, 0])
    program = burnish.compile(module, example_inputs=(word,))
    nn.functional.cross_entropy(module(word), labels).backward()
    values = program.initial_state() | {"word": word.numpy(), "labels": labels.numpy()}
    outputs = burnish.engines.get(engine).run(
        program.grad, {entry.name: values[entry.name] for entry in program.signature["grad"].inputs}
    )
    for name, parameter in module.named_parameters():
        np.testing.assert_allclose(outputs[f"grad:{name}"], parameter.grad, rtol=1e-4, atol=1e-6, err_msg=name)
    assert "hold_rows" not in program.options
    assert module.words.weight.grad[0].abs().max() > 0.01


@pytest.mark.slow
def test_an_average_over_all_batches_goes_on_with_those_that_the_module_has_seen() -> None:
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6, momentum=None), nn.Linear(6, 3)).train()
    with torch.no_grad():
        for _ in range(3):
            module(torch.randn(16, 4) * 2 + 5)
    reference = copy.deepcopy(module).double()
    program = burnish.compile(module, example_inputs=(torch.randn(8, 4),), optimizer="sgd:lr=0.0")
    assert program.options["norm_layers"] == {"1": "train:momentum=cumulative,seen=3"}
    session = burnish.Session(program)
    rng = np.random.default_rng(0)
    for _ in range(2):
        x = rng.normal(size=(8, 4)).astype(np.float32)
        session.step({"input": x, "labels": np.arange(8) % 3})
        reference(torch.from_numpy(x).double())
    burnish.torch.load_into(module, session)
    assert int(module[1].num_batches_tracked) == 5
    for statistic in ("running_mean", "running_var"):
        torch.testing.assert_close(getattr(module[1], statistic).double(), getattr(reference[1], statistic), atol=1e-5, rtol=1e-5)


@pytest.mark.slow
def test_a_module_in_training_mode_predicts_as_in_evaluation_without_a_warning() -> None:
    module = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Dropout(0.5), nn.Linear(6, 3)).train()
    x = torch.randn(8, 4)
    session = burnish.Session(burnish.compile(module, example_inputs=(x,)))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        predicted = session.predict({"input": x.numpy()})["output"]
    np.testing.assert_allclose(predicted, module.eval()(x).detach(), atol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("training", [True, False])
def test_synchronized_batch_normalization_is_that_of_the_whole_batch(training: bool) -> None:
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Linear(6, 3))
    synchronized = nn.SyncBatchNorm.convert_sync_batchnorm(copy.deepcopy(plain))
    synchronized[1].train(training), plain[1].train(training)
    own = nn.SyncBatchNorm.forward
    x, labels = torch.randn(8, 4), torch.arange(8) % 3
    program = burnish.compile(synchronized, example_inputs=(torch.randn(4, 4),), optimizer="sgd:lr=0.1,momentum=0")
    assert program.options["norm_layers"] == {"1": "sync:momentum=0.9" if training else "frozen"}
    session = burnish.Session(program)
    right = nn.functional.cross_entropy(plain(x), labels)
    assert session.step({"input": x.numpy(), "labels": labels.numpy()})["loss"] == pytest.approx(right.item(), abs=1e-5)
    np.testing.assert_allclose(session.state()["stat/1.running_mean"], plain[1].running_mean, atol=1e-6)
    wrapped = burnish.torch.wrap(synchronized, torch.randn(4, 4))
    assert nn.functional.cross_entropy(wrapped(x), labels).item() == pytest.approx(right.item(), abs=1e-5)
    assert nn.SyncBatchNorm.forward is own
