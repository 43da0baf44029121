"""What a session trained goes back into a module; what does not fit is refused, and nothing is written."""

import pytest
import torch
from torch import nn

import burnish
from burnish.errors import ConfigurationError
from burnish.torch import load_into


@pytest.fixture(scope="module")
def session():
    module = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4, momentum=None), nn.Linear(4, 2))
    program = burnish.compile(module, example_inputs=torch.ones(2, 3))
    with burnish.Session(program, engine="onnxruntime") as session:
        session.step({"input": torch.randn(4, 3).numpy(), "labels": torch.tensor([0, 1, 1, 0]).numpy()})
        yield session


@pytest.mark.slow
def test_tensors_stay_the_objects_that_they_are(session):
    module = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4, momentum=None), nn.Linear(4, 2))
    weight = module[0].weight
    load_into(module, session)
    assert module[0].weight is weight
    assert torch.equal(weight.detach(), torch.from_numpy(session.state()["param/0.weight"]))
    assert module[1].num_batches_tracked == 1


def test_a_dtype_stays(session):
    module = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4, momentum=None), nn.Linear(4, 2)).double()
    load_into(module, session)
    assert module[2].bias.dtype == torch.float64
    assert torch.equal(module[2].bias.float(), torch.from_numpy(session.state()["param/2.bias"]))


def test_a_module_that_lacks_a_tensor_is_refused(session):
    module = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))
    before = module[0].weight.clone()
    with pytest.raises(ConfigurationError, match=r"no parameter or buffer '2\.weight'"):
        load_into(module, session)
    assert torch.equal(module[0].weight, before)


def test_another_shape_is_refused(session):
    module = nn.Sequential(nn.Linear(5, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))
    with pytest.raises(ConfigurationError, match=r"'0\.weight' has shape \[4, 5\] in the module and \[4, 3\] in the program"):
        load_into(module, session)
