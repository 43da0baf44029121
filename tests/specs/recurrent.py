"""Recurrent layers, against PyTorch's, with the weights in PyTorch's order of gates and padded batches packed."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import torch
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

from specs.operator_spec import ErrorInput, OperatorSpec, Sample, normal

FRAMES, BATCH, FEATURES, HIDDEN = 5, 3, 4, 2
GATES = {"LSTM": 4, "GRU": 3, "RNN": 1}
# PyTorch's order of gates in the standard's: i f g o from i o f c, and r z n from z r h.
ORDER = {"LSTM": (0, 2, 3, 1), "GRU": (1, 0, 2), "RNN": (0,)}
DIRECTIONS = {"forward": 1, "reverse": 1, "bidirectional": 2}


def operands(
    rng: np.random.Generator,
    kind: str,
    direction: str = "forward",
    bias: bool = True,
    lengths: tuple[int, ...] | None = None,
    initial: bool = True,
    peepholes: bool = False,
    layout: int = 0,
) -> list[np.ndarray | None]:
    count, rows = DIRECTIONS.get(direction, 1), GATES[kind] * HIDDEN
    x = normal(rng, FRAMES, BATCH, FEATURES)
    state = [normal(rng, count, BATCH, HIDDEN) if initial else None for _ in range(2 if kind == "LSTM" else 1)]
    if layout:
        x, state = x.swapaxes(0, 1).copy(), [None if h is None else h.swapaxes(0, 1).copy() for h in state]
    weights = [normal(rng, count, rows, FEATURES) / 2, normal(rng, count, rows, HIDDEN) / 2]
    inputs = [
        x,
        *weights,
        normal(rng, count, 2 * rows) if bias else None,
        None if lengths is None else np.array(lengths, np.int32),
        *state,
        *([normal(rng, count, 3 * HIDDEN)] if peepholes else []),
    ]
    while inputs[-1] is None:
        inputs.pop()
    return inputs


def sample(rng: np.random.Generator, kind: str, name: str, attributes: dict | None = None, **given) -> Sample:
    attributes = dict(attributes or {})
    options = {key: given.pop(key) for key in ("outputs", "cotangents", "torch", "constants", "batched", "wrt") if key in given}
    direction, layout = attributes.get("direction", "forward"), attributes.get("layout", 0)
    inputs = operands(rng, kind, direction, layout=layout, **given)
    options.setdefault("outputs", 3 if kind == "LSTM" else 2)
    return Sample(inputs, {"hidden_size": HIDDEN, **attributes}, name=name, **options)


def samples_of(kind: str, rng: np.random.Generator) -> Iterator[Sample]:
    yield sample(rng, kind, "forward")
    yield sample(rng, kind, "reverse", {"direction": "reverse"})
    yield sample(rng, kind, "bidirectional", {"direction": "bidirectional"})
    yield sample(rng, kind, "plain", bias=False, initial=False)
    yield sample(rng, kind, "frames_alone", outputs=1)
    yield sample(rng, kind, "last_state_alone", {"direction": "bidirectional"}, cotangents=[1])
    yield sample(rng, kind, "batch_first", {"layout": 1, "direction": "bidirectional"})
    yield sample(rng, kind, "batch_first_reverse", {"layout": 1, "direction": "reverse"}, bias=False)
    for direction in DIRECTIONS:
        yield sample(rng, kind, f"lengths_{direction}", {"direction": direction}, lengths=(3, 5, 1), constants=(), batched=(0,))
    yield sample(rng, kind, "lengths_batch_first", {"layout": 1}, lengths=(4, 2, 5), initial=False, batched=(0, 4))
    yield sample(rng, kind, "weights_as_initializers", constants=(1, 2, 3))
    yield sample(rng, kind, "frozen_weights", wrt=(0,), constants=(1, 2, 3))


def lstm_samples(rng: np.random.Generator) -> Iterator[Sample]:
    yield from samples_of("LSTM", rng)
    yield sample(rng, "LSTM", "last_cell_alone", cotangents=[2])
    for direction in DIRECTIONS:
        yield sample(
            rng,
            "LSTM",
            f"peepholes_{direction}",
            {"direction": direction},
            peepholes=True,
            lengths=(2, 5, 4),
            torch=peephole_lstm,
        )
    yield sample(rng, "LSTM", "peepholes", peepholes=True, torch=peephole_lstm)
    yield sample(rng, "LSTM", "named_activations", {"activations": ["sigmoid", "TANH", "Tanh"]})


# What is not of a cell is the same for all three layers, and LSTM has every sample of it.
OF_A_CELL = ("forward", "bidirectional", "plain", "lengths_reverse", "weights_as_initializers")


def gru_samples(rng: np.random.Generator) -> Iterator[Sample]:
    for before in samples_of("GRU", rng):
        attributes = {**before.attributes, "linear_before_reset": 1}
        yield Sample(**{**vars(before), "attributes": attributes})
    for after in samples_of("GRU", rng):
        beside = {"name": f"reset_first_{after.name}", "torch": gru_with_reset_first, "repeated": after.name not in OF_A_CELL}
        yield Sample(**{**vars(after), **beside})


def rnn_samples(rng: np.random.Generator) -> Iterator[Sample]:
    for made in samples_of("RNN", rng):
        yield replace(made, repeated=made.name not in OF_A_CELL)
    for activation in ("Relu", "Sigmoid"):
        attributes = {"activations": [activation], "layout": 0}
        yield sample(rng, "RNN", activation.lower(), attributes, torch=step_by_step_rnn)
    mixed = {"activations": ["Relu", "Tanh"], "direction": "bidirectional"}
    yield sample(rng, "RNN", "an_activation_per_direction", mixed, lengths=(5, 1, 3), torch=step_by_step_rnn)


def rearranged(kind: str, tensor: torch.Tensor) -> torch.Tensor:
    parts = tensor.chunk(GATES[kind])
    return torch.cat([parts[index] for index in ORDER[kind]])


def torch_layer(kind, x, w, r, b=None, lengths=None, h=None, c=None, *, direction="forward", layout=0, **_):
    """PyTorch's layer; one direction in reverse is the second of a bidirectional one."""
    names, count = [""] if direction == "forward" else ["", "_reverse"], w.shape[0]
    layer = getattr(torch.nn, kind)(FEATURES, HIDDEN, bias=b is not None, bidirectional=len(names) == 2, dtype=x.dtype)
    parameters = {}
    for index, name in enumerate(names):
        own = min(index, count - 1)
        parameters[f"weight_ih_l0{name}"] = rearranged(kind, w[own])
        parameters[f"weight_hh_l0{name}"] = rearranged(kind, r[own])
        if b is not None:
            of_input, recurrent = b[own].chunk(2)
            parameters[f"bias_ih_l0{name}"] = rearranged(kind, of_input)
            parameters[f"bias_hh_l0{name}"] = rearranged(kind, recurrent)
    if layout:
        x, h, c = (None if tensor is None else tensor.transpose(0, 1) for tensor in (x, h, c))
    states = [x.new_zeros(count, x.shape[1], HIDDEN) if state is None else state for state in (h, c)]
    states = [torch.cat([state] * (len(names) // count)) for state in states[: 2 if kind == "LSTM" else 1]]
    fed = x if lengths is None else pack_padded_sequence(x, lengths.long(), enforce_sorted=False)
    initial = tuple(states) if kind == "LSTM" else states[0]
    y, last = torch.func.functional_call(layer, parameters, (fed, initial))
    if lengths is not None:
        y, _ = pad_packed_sequence(y, total_length=x.shape[0])
    y = y.unflatten(2, (len(names), HIDDEN)).transpose(1, 2)
    return finished(y[:, -count:], [state[-count:] for state in (last if kind == "LSTM" else (last,))], layout)


def step_by_step(step, x, lengths, states, direction, layout):
    """A layer written out: ``step(direction, x_t, *states) -> states``, the first of which is the output."""
    if layout:
        x, *states = (tensor.transpose(0, 1) for tensor in (x, *states))
    frames, lasts = [], []
    for own, reverse in enumerate({"forward": [0], "reverse": [1], "bidirectional": [0, 1]}[direction]):
        current, rows = [state[own] for state in states], [None] * len(x)
        for t in reversed(range(len(x))) if reverse else range(len(x)):
            live = torch.ones(x.shape[1], 1, dtype=torch.bool) if lengths is None else (t < lengths)[:, None]
            following = step(own, x[t], *current)
            current = [torch.where(live, new, old) for new, old in zip(following, current, strict=True)]
            rows[t] = current[0] * live
        frames.append(torch.stack(rows))
        lasts.append(current if lengths is None else [state * (lengths > 0)[:, None] for state in current])
    return finished(torch.stack(frames, 1), [torch.stack(parts) for parts in zip(*lasts, strict=True)], layout)


def finished(y, states, layout):
    if layout:
        return y.permute(2, 0, 1, 3), *(state.transpose(0, 1) for state in states)
    return y, *states


def zeros_or(state, x, w, layout):
    batch = x.shape[0 if layout else 1]
    shape = (batch, w.shape[0], HIDDEN) if layout else (w.shape[0], batch, HIDDEN)
    return x.new_zeros(shape) if state is None else state


def peephole_lstm(x, w, r, b, lengths, h, c, p, *, direction="forward", layout=0, **_):
    def step(own, x, h, c):
        p_i, p_o, p_f = p[own].chunk(3)
        i, o, f, g = (x @ w[own].T + h @ r[own].T + sum(b[own].chunk(2))).chunk(4, -1)
        c_next = torch.sigmoid(f + p_f * c) * c + torch.sigmoid(i + p_i * c) * torch.tanh(g)
        return torch.sigmoid(o + p_o * c_next) * torch.tanh(c_next), c_next

    return step_by_step(step, x, lengths, [h, c], direction, layout)


def gru_with_reset_first(x, w, r, b=None, lengths=None, h=None, *, direction="forward", layout=0, **_):
    def step(own, x, h):
        x_z, x_r, x_n = (x @ w[own].T + (0 if b is None else sum(b[own].chunk(2)))).chunk(3, -1)
        r_z, r_r, r_n = r[own].chunk(3)
        z, reset = torch.sigmoid(x_z + h @ r_z.T), torch.sigmoid(x_r + h @ r_r.T)
        return ((1 - z) * torch.tanh(x_n + (reset * h) @ r_n.T) + z * h,)

    return step_by_step(step, x, lengths, [zeros_or(h, x, w, layout)], direction, layout)


def step_by_step_rnn(x, w, r, b=None, lengths=None, h=None, *, activations, direction="forward", layout=0, **_):
    def step(own, x, h):
        return (getattr(torch, activations[own].lower())(x @ w[own].T + h @ r[own].T + sum(b[own].chunk(2))),)

    return step_by_step(step, x, lengths, [zeros_or(h, x, w, layout)], direction, layout)


def refusal(kind: str, name: str, match: str, **attributes) -> ErrorInput:
    return ErrorInput(sample(np.random.default_rng(1), kind, name, attributes), rf"{kind} .*{match}.*or let nothing train")


SPECS = [
    OperatorSpec(
        "LSTM",
        lstm_samples,
        torch=lambda *inputs, **attributes: torch_layer("LSTM", *inputs, **attributes),
        error_inputs=[
            refusal("LSTM", "clip", "has the attribute clip, .* export the model without it", clip=3.0),
            refusal("LSTM", "too_few", "names 3 activations, .* takes 6", direction="bidirectional", activations=["Tanh"] * 3),
            refusal("LSTM", "direction", "has direction='both', .* forward, reverse, bidirectional", direction="both"),
            ErrorInput(
                Sample(operands(np.random.default_rng(1), "LSTM"), name="no_hidden_size", outputs=3),
                "LSTM .*has no hidden_size and its recurrent weight 'input2' no known shape: export it with the attribute",
                shapes="symbolic",
            ),
            refusal("LSTM", "input_forget", "has input_forget=1, .* separate input and forget gates", input_forget=1),
            refusal(
                "LSTM",
                "activation",
                "the activation 'relu' where only Tanh has a gradient here: write the layer out",
                activations=["Sigmoid", "Relu", "Tanh"],
            ),
        ],
    ),
    OperatorSpec(
        "GRU",
        gru_samples,
        torch=lambda *inputs, **attributes: torch_layer("GRU", *inputs, **attributes),
        error_inputs=[
            refusal("GRU", "clip", "has the attribute clip", clip=3.0),
            refusal("GRU", "activation", "'softsign' where only Tanh", activations=["Sigmoid", "Softsign"]),
        ],
    ),
    OperatorSpec(
        "RNN",
        rnn_samples,
        torch=lambda *inputs, **attributes: torch_layer("RNN", *inputs, **attributes),
        error_inputs=[
            refusal("RNN", "clip", "has the attribute clip", clip=3.0),
            refusal("RNN", "activation", "'elu' where only Tanh or Relu or Sigmoid has", activations=["Elu"]),
        ],
    ),
]
