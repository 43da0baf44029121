"""The networks that steps are timed of have the parameters that they were published with."""

import pytest
import torch

from workloads import WORKLOADS

# As the papers, or the packages that ship trained weights, count them.
PARAMETERS = {
    "resnet50": 25_557_032,
    "mobilenet_v2": 3_504_872,
    "efficientnet_b0": 5_288_548,
    "mobilenet_v3": 5_483_032,
    "densenet121": 7_978_856,
    "deeplab": 39_638_869,
    "r3d_18": 33_371_472,
    "convnext_tiny": 28_589_128,
    "vit_small": 22_050_664,
    "gpt2": 124_439_808,
}


@pytest.mark.parametrize("name", PARAMETERS)
def test_published_networks_have_as_many_parameters(name):
    with torch.device("meta"):
        module = WORKLOADS[name].build()
    assert sum(parameter.numel() for parameter in module.parameters()) == PARAMETERS[name]


@pytest.mark.parametrize(
    ("name", "sample", "output"),
    [
        ("deeplab", (3, 64, 96), (21, 64, 96)),
        ("r3d_18", (3, 16, 112, 112), (400,)),
        ("densenet121", (3, 224, 224), (1000,)),
        ("efficientnet_b0", (3, 224, 224), (1000,)),
        ("mobilenet_v3", (3, 224, 224), (1000,)),
        ("convnext_tiny", (3, 224, 224), (1000,)),
        ("vit_small", (3, 224, 224), (1000,)),
    ],
)
def test_published_networks_return_a_number_for_every_class(name, sample, output):
    with torch.device("meta"):
        module = WORKLOADS[name].build()
        assert module(torch.zeros(2, *sample)).shape == (2, *output)
