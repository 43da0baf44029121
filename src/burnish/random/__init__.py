"""Random numbers as pure functions of a key: keys, random words, keep masks, dropout and other draws, in ONNX operators.

The generator is counter-based: the key is the only state between draws, and belongs to the program's state. It is for dropout
and noise, not for cryptography.
"""

from burnish.random.distributions import bernoulli, multinomial, normal, symmetric_beta, uniform
from burnish.random.draws import dropout, keep_mask, uniform_bits
from burnish.random.keys import KEY_DTYPE, KEY_SHAPE, check_seed, initial_key, key_from_seed, next_key
from burnish.random.places import ALIKE, Numbered, Places

__all__ = [
    "ALIKE",
    "KEY_DTYPE",
    "KEY_SHAPE",
    "Numbered",
    "Places",
    "bernoulli",
    "check_seed",
    "dropout",
    "initial_key",
    "keep_mask",
    "key_from_seed",
    "multinomial",
    "next_key",
    "normal",
    "symmetric_beta",
    "uniform",
    "uniform_bits",
]
