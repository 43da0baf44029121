"""The standard's attention layer and rotary position embedding."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch
from torch.nn import functional

from specs.operator_spec import OperatorSpec, Sample, normal

OPSET = 23
NEWEST = 24
WINDOWS = 25


def torch_attention(q, k, v, mask=None, past_key=None, past_value=None, lengths=None, **attributes):
    """PyTorch's own function, over a mask that it is given; a cap and a cache in pieces."""
    heads, in_one = attributes.get("q_num_heads"), q.dim() == 3
    if in_one:
        q, k, v = (
            x.unflatten(-1, (count, -1)).transpose(1, 2)
            for x, count in ((q, heads), (k, attributes["kv_num_heads"]), (v, attributes["kv_num_heads"]))
        )
    if past_key is not None:
        k, v = torch.cat([past_key, k], 2), torch.cat([past_value, v], 2)
    queries, keys = q.shape[2], k.shape[2]
    bias = torch.zeros(queries, keys, dtype=q.dtype)
    if mask is not None:
        excluded = torch.zeros(mask.shape, dtype=q.dtype).masked_fill(~mask, -torch.inf) if mask.dtype == torch.bool else mask
        bias = (
            bias + functional.pad(excluded, (0, keys - mask.shape[-1]), value=-torch.inf)
            if keys > mask.shape[-1] > 1
            else bias + excluded
        )
    before, after = attributes.get("left_window_size", keys), attributes.get("right_window_size", keys)
    after = 0 if attributes.get("is_causal") else after
    if min(before, after) < keys:
        offset = 0 if past_key is None else past_key.shape[2]
        offset = offset if lengths is None else lengths.reshape(-1, 1, 1, 1) - queries
        distance = torch.arange(keys) - torch.arange(queries)[:, None] - offset
        seen = (distance <= after) & (distance >= -before)
        bias = bias + torch.zeros(seen.shape, dtype=q.dtype).masked_fill(~seen, -torch.inf)
    if lengths is not None:
        is_token = torch.arange(keys) < lengths.reshape(-1, 1, 1, 1)
        bias = bias + torch.zeros(is_token.shape, dtype=q.dtype).masked_fill(~is_token, -torch.inf)
    scale, cap = attributes.get("scale", q.shape[-1] ** -0.5), attributes.get("softcap")
    repeats = q.shape[1] // k.shape[1]
    wide_k, wide_v = k.repeat_interleave(repeats, 1), v.repeat_interleave(repeats, 1)
    scores = q @ wide_k.transpose(2, 3) * scale
    capped = cap * torch.tanh(scores / cap) if cap else scores
    excluded_rows = (bias == -torch.inf).all(-1, keepdim=True)
    safe = bias.masked_fill(excluded_rows, 0)
    probabilities = torch.softmax(capped + safe, -1) * ~excluded_rows
    if cap:
        y = probabilities @ wide_v
    else:
        y = (
            functional.scaled_dot_product_attention(q, wide_k, wide_v, attn_mask=safe.expand(scores.shape), scale=scale)
            * ~excluded_rows
        )
    y = y.transpose(1, 2).flatten(2) if in_one else y
    stage = (scores, capped, capped + bias, probabilities)[attributes.get("qk_matmul_output_mode", 0)]
    return y, k, v, stage


def attention_samples(rng: np.random.Generator) -> Iterator[Sample]:
    q, k, v = normal(rng, 2, 3, 4, 5), normal(rng, 2, 3, 6, 5), normal(rng, 2, 3, 6, 2)

    def sample(inputs, attributes=None, name="", **record) -> Sample:
        return Sample(inputs, attributes or {}, name=name, opset=OPSET, batched=(0, 1, 2), **record)

    mask = rng.random((2, 1, 4, 6)) > 0.4
    excluding = mask.copy()
    excluding[0, 0, 2] = False
    yield sample([q, k, v], name="plain")
    yield sample([q, k, v], {"scale": 0.3}, name="scale", repeated=True)
    yield sample([q, k, v, normal(rng, 4, 6)], name="float_mask")
    yield sample([q, k, v, mask], name="bool_mask")
    yield sample([q, k, v, excluding], name="all_excluded")
    yield sample([q, k, v, normal(rng, 2, 3, 1, 6)], {"is_causal": 1, "softcap": 0.8}, name="causal_cap_mask")
    yield sample([q, k[:, :, :4], v[:, :, :4]], {"is_causal": 1}, name="causal")
    yield sample([normal(rng, 2, 6, 4, 5), k, v], name="grouped")
    rows = [normal(rng, 2, 4, 12), normal(rng, 2, 5, 6), normal(rng, 2, 5, 4)]
    yield sample(rows, {"q_num_heads": 4, "kv_num_heads": 2}, name="in_one_grouped")
    past = [normal(rng, 2, 3, 2, 5), normal(rng, 2, 3, 2, 2)]
    cached = Sample([q, k, v, None, *past], {"is_causal": 1}, name="past", opset=OPSET, outputs=3, batched=(0, 1, 2, 4, 5))
    yield cached
    for mode in range(4):
        attributes = {"qk_matmul_output_mode": mode, "softcap": 1.5}
        cotangents = (0, 3)
        yield sample([q, k, v, normal(rng, 4, 6)], attributes, name=f"stage_{mode}", outputs=4, cotangents=cotangents)
    window = {"left_window_size": 1, "right_window_size": 2}
    yield Sample([q, k, v], window, name="window", opset=WINDOWS)
    yield Sample([q, k, v, None, *past], {"left_window_size": 2, "is_causal": 1}, name="window_past", opset=WINDOWS)
    yield Sample(
        [normal(rng, 1, 1, 6, 2), normal(rng, 1, 1, 2, 2), normal(rng, 1, 1, 2, 2)], window, name="empty_windows", opset=WINDOWS
    )
    lengths = np.array([3, 6])
    newest = {"opset": NEWEST, "batched": (0, 1, 2)}
    yield Sample([q, k, v, None, None, None, lengths], {"is_causal": 1}, name="lengths_causal", **newest)
    yield Sample([q, k, v, None, None, None, lengths], name="lengths", **newest)
    yield Sample([q, k, v, normal(rng, 4, 5)], name="short_mask", **newest)
    yield Sample([q, k, v, rng.random((4, 4)) > 0.3], name="short_bool_mask", **newest)


def torch_rotary(x, cosine, sine, positions=None, interleaved=0, rotary_embedding_dim=0, num_heads=None):
    in_one = x.dim() == 3
    x = x.unflatten(-1, (num_heads, -1)).transpose(1, 2) if in_one else x
    if positions is not None:
        cosine, sine = cosine[positions], sine[positions]
    cosine, sine = cosine[:, None], sine[:, None]
    size = rotary_embedding_dim or x.shape[-1]
    turned, rest = x[..., :size], x[..., size:]
    one, other = (turned[..., 0::2], turned[..., 1::2]) if interleaved else turned.chunk(2, -1)
    real, imaginary = one * cosine - other * sine, one * sine + other * cosine
    turned = torch.stack([real, imaginary], -1).flatten(-2) if interleaved else torch.cat([real, imaginary], -1)
    y = torch.cat([turned, rest], -1)
    return y.transpose(1, 2).flatten(2) if in_one else y


def rotary_samples(rng: np.random.Generator) -> Iterator[Sample]:
    heads, rows = normal(rng, 2, 3, 4, 6), normal(rng, 2, 4, 12)
    table, positions = [normal(rng, 7, 3), normal(rng, 7, 3)], rng.integers(0, 7, (2, 4))
    each = [normal(rng, 2, 4, 3), normal(rng, 2, 4, 3)]
    for interleaved in (0, 1):
        attributes = {"interleaved": interleaved}
        kind = "interleaved" if interleaved else "halves"
        yield Sample([heads, *table, positions], attributes, name=kind, opset=OPSET)
        yield Sample([heads, *each], attributes, name=f"{kind}_given", opset=OPSET, batched=(0, 1, 2))
        partial = {**attributes, "rotary_embedding_dim": 4}
        small = [table[0][:, :2], table[1][:, :2]]
        yield Sample([heads, *small, positions], partial, name=f"{kind}_partial", opset=OPSET)
        yield Sample([rows, *table, positions], {**attributes, "num_heads": 2}, name=f"{kind}_in_one", opset=OPSET)


SPECS = [
    OperatorSpec(
        "Attention",
        attention_samples,
        torch=torch_attention,
        dtypes=("float32", "float64", "float16"),
        shapes=("static", "batch"),
        float64_tolerance=1e-7,
    ),
    OperatorSpec("RotaryEmbedding", rotary_samples, torch=torch_rotary, dtypes=("float32",), shapes=("static", "batch")),
]
