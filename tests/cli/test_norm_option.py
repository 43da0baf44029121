"""The text of ``--norm``: one policy, or a policy for each of some layers, with commas between policies and between settings."""

from __future__ import annotations

import pytest

from burnish.compiler.options import read_norms
from burnish.errors import ConfigurationError


@pytest.mark.parametrize(
    ("given", "policies"),
    [
        ([], "auto"),
        (["frozen"], "frozen"),
        (["ghost:32"], "ghost:32"),
        (["ghost:32,momentum=0.5"], "ghost:32,momentum=0.5"),
        (["train:momentum=cumulative"], "train:momentum=cumulative"),
        (["renorm:r_max=2,d_max=3"], "renorm:r_max=2,d_max=3"),
        (["layer3*=frozen"], {"layer3*": "frozen"}),
        (["*=train", "layer3*=frozen:all"], {"*": "train", "layer3*": "frozen:all"}),
        (["stem=renorm:r_max=2,d_max=3,layer*=ghost:8"], {"stem": "renorm:r_max=2,d_max=3", "layer*": "ghost:8"}),
    ],
)
def test_what_is_given_is_read_as_policies(given, policies):
    assert read_norms(given) == policies


@pytest.mark.parametrize("given", [["train", "frozen"], ["stem=frozen", "ghost:32"], ["=frozen"], ["stem="]])
def test_several_policies_need_patterns(given):
    with pytest.raises(ConfigurationError, match="with several --norm, each is PATTERN=POLICY, such as 'stem\\*=frozen'"):
        read_norms(given)
