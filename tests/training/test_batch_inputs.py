"""Checks of a batch, before anything runs."""

from __future__ import annotations

import re

import numpy as np
import onnx_ir as ir
import pytest

from burnish.errors import ConfigurationError, InputError
from burnish.program import Entry, GraphSignature, Role
from burnish.training.inputs import BatchCheck, HyperparameterCheck, check_batch, check_hyperparameters

SIGNATURE = GraphSignature(
    (
        Entry("image", Role.DATA, ir.DataType.FLOAT, ("batch", 3, 4, 4)),
        Entry("mask", Role.DATA, ir.DataType.BOOL, ("batch", None)),
        Entry("labels", Role.LABEL, ir.DataType.INT64, ("batch",), minimum=0, maximum=9, ignored=-100),
        Entry("lr", Role.HYPERPARAMETER, ir.DataType.FLOAT, (), default=0.1),
        Entry("decay", Role.HYPERPARAMETER, ir.DataType.FLOAT, ()),
        Entry("param/w", Role.PARAMETER, ir.DataType.FLOAT, (3,)),
    ),
    (),
)


class Unreadable:
    def __array__(self, dtype=None, copy=None):
        raise RuntimeError("call detach first")


def batch(**changes):
    values = {
        "image": np.zeros((2, 3, 4, 4), np.float32),
        "mask": np.ones((2, 7), bool),
        "labels": np.array([3, 9]),
    }
    values |= changes
    return {name: value for name, value in values.items() if value is not None}


def test_a_fitting_batch_is_not_copied():
    given = batch()
    checked = check_batch(SIGNATURE, given)
    assert list(checked) == ["image", "mask", "labels"]
    for name, array in checked.items():
        assert array is given[name]


@pytest.mark.parametrize(
    ("wanted", "labels"),
    [(("batch", 1, 1), np.array([3, 9])), (("batch", 1, 1), np.array([[3], [9]])), ((2, "width", 1), np.zeros((2, 5), np.int64))],
)
def test_labels_may_leave_out_last_axes_of_extent_one(wanted, labels):
    signature = GraphSignature((Entry("labels", Role.LABEL, ir.DataType.INT64, wanted, minimum=0, maximum=9),), ())
    checked = check_batch(signature, {"labels": labels})["labels"]
    assert checked.shape == (*labels.shape, *[1] * (3 - labels.ndim))
    np.testing.assert_array_equal(checked.reshape(labels.shape), labels)


def test_other_axes_are_not_left_out():
    signature = GraphSignature(
        (
            Entry("x", Role.DATA, ir.DataType.FLOAT, ("batch", 1)),
            Entry("labels", Role.LABEL, ir.DataType.INT64, ("batch", 1, 2)),
        ),
        (),
    )
    fitting = {"x": np.zeros((2, 1), np.float32), "labels": np.zeros((2, 1, 2), np.int64)}
    check_batch(signature, fitting)
    for name, shape in (("labels", (2,)), ("labels", (2, 1)), ("x", (2,))):
        with pytest.raises(InputError, match=rf"'{name}' has {len(shape)} dimensions"):
            check_batch(signature, {**fitting, name: fitting[name].reshape(-1)[: np.prod(shape)].reshape(shape)})


def test_nothing_else_than_a_dict_is_a_batch():
    with pytest.raises(InputError, match=r"dict of arrays by input name, not a tuple: give \{'image': \.\.\., 'mask'"):
        check_batch(SIGNATURE, (1, 2))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"labels": None}, r"lacks the input 'labels' \(int64 of shape \[batch\]\): add it"),
        ({"image": None, "x": 1}, r"lacks the input 'image' \(float32 of shape \[batch, 3, 4, 4\]\); instead it has 'x'"),
        ({"label": np.zeros(2)}, r"unexpected input 'label' \(did you mean 'labels'\?\): expected 'image', 'mask', 'labels'"),
        ({"param/w": np.zeros(3)}, r"unexpected input 'param/w'"),
        ({"image": np.zeros((3, 4, 4), np.float32)}, r"'image' has 3 dimensions, and the program takes 4: .*got \[3, 4, 4\]"),
        (
            {"labels": np.zeros((2, 1), int)},
            r"'labels' has 2 dimensions.*expected shape \[batch\], got \[2, 1\]: give its reshape\(-1\)",
        ),
        ({"image": np.zeros((2, 3, 4, 5), np.float32)}, r"'image' has extent 5 along axis 3, and the program takes 4"),
        ({"image": np.zeros((2, 1, 4, 4), np.float32)}, r"'image' has extent 1 along axis 1.*got \[2, 1, 4, 4\]$"),
        ({"labels": np.zeros(3, int)}, r"'image' and 'labels' disagree about 'batch': 2 and 3"),
        ({"image": np.zeros((0, 3, 4, 4), np.float32)}, r"'image' is empty along axis 0.*leave empty batches out"),
        ({"mask": np.zeros((2, 0), bool)}, r"'mask' is empty along axis 1"),
        ({"image": np.zeros((2, 3, 4, 4), np.uint8)}, r"'image' has dtype uint8, expected float32; scale integers .*astype"),
        ({"image": np.full((2, 3, 4, 4), "a")}, r"'image' has dtype <U1, which is not numeric"),
        ({"image": np.zeros((2, 3, 4, 4), complex)}, r"'image' has dtype complex128, expected float32"),
        ({"labels": np.array([1.0, 2.0])}, r"'labels' has dtype float64, expected int64; class indices are integers"),
        ({"labels": np.array(["cat", "dog"])}, r"'labels' has dtype <U3, which is not numeric: give int64"),
        ({"labels": np.array([1, None])}, r"'labels' has dtype object, which is not numeric"),
        ({"labels": np.array([True, False])}, r"'labels' has dtype bool, expected int64"),
        ({"labels": [[1, 2], [3]]}, r"'labels' is a list that is not an array"),
        ({"labels": Unreadable()}, r"'labels' is a Unreadable that is not an array \(call detach first\)"),
        ({"mask": np.ones((2, 7), int)}, r"'mask' has dtype int64, expected bool"),
        ({"labels": np.array([3, 10])}, r"'labels' holds 10 at \[1\], out of range: valid are 0\.\.9 or -100, which is ignored"),
        ({"labels": np.array([-1, 99])}, r"'labels' holds -1 at \[0\], out of range"),
        ({"labels": np.array([-100, 99])}, r"'labels' holds 99 at \[1\], out of range"),
        (
            {"labels": np.array([1, 2**64 - 1], np.uint64)},
            r"'labels' holds 18446744073709551615 at \[1\], which int64 cannot",
        ),
    ],
)
def test_a_batch_that_does_not_fit_is_refused(changes, message):
    with pytest.raises(InputError, match=message):
        check_batch(SIGNATURE, batch(**changes))


@pytest.mark.parametrize("shape", [(4, 10), (4, 3, 10), (4, 10, 3)])
def test_labels_of_a_number_for_each_class_say_what_to_do(shape):
    extents = ("batch", *[3] * (len(shape) - 2))
    signature = GraphSignature((Entry("labels", Role.LABEL, ir.DataType.INT64, extents, minimum=0, maximum=9),), ())
    axis = 1 if shape[1] == 10 else -1
    said = rf"one class \(one-hot\), give its argmax\(axis={axis}\); .*'cross_entropy:probabilities=true'.*'bce_with_logits'$"
    with pytest.raises(InputError, match=said):
        check_batch(signature, {"labels": np.zeros(shape, np.float32)})


def test_class_indices_for_values_say_what_to_do():
    signature = GraphSignature((Entry("targets", Role.LABEL, ir.DataType.FLOAT, ("batch", 3)),), ())
    with pytest.raises(InputError, match="where these are class indices, choose a loss over classes"):
        check_batch(signature, {"targets": np.arange(4)})
    with pytest.raises(InputError, match=r"has dtype int64, expected float32: convert it"):  # no word of pixels
        check_batch(signature, {"targets": np.zeros((4, 3), int)})


@pytest.mark.parametrize("dtype", [np.int8, np.uint8, np.int16, np.int32, np.uint32, np.uint64, ">i8", ">i4"])
def test_integers_are_widened(dtype):
    labels = check_batch(SIGNATURE, batch(labels=np.array([3, 9], dtype)))["labels"]
    assert labels.dtype == np.int64
    assert labels.dtype.isnative
    np.testing.assert_array_equal(labels, [3, 9])


@pytest.mark.parametrize("dtype", [np.float16, np.float64, ">f4", ir.DataType.BFLOAT16.numpy()])
def test_floats_are_rounded_to_the_programs_type(dtype):
    values = np.random.default_rng(0).normal(size=(2, 3, 4, 4)).astype(dtype)
    image = check_batch(SIGNATURE, batch(image=values))["image"]
    assert image.dtype == np.float32
    assert image.dtype.isnative
    np.testing.assert_array_equal(image, values.astype(np.float32))


def test_a_value_too_large_for_the_programs_type_is_refused():
    values = np.zeros((2, 3, 4, 4))
    values[1, 2, 0, 3] = -1e39
    with pytest.raises(InputError, match=re.escape("'image' holds -1e+39 at [1, 2, 0, 3], too large for float32")):
        check_batch(SIGNATURE, batch(image=values))


def test_nan_and_infinity_in_data_are_left_to_the_check_of_the_loss():
    values = np.zeros((2, 3, 4, 4))
    values[0, 0, 0, 0], values[0, 0, 0, 1] = np.nan, np.inf
    image = check_batch(SIGNATURE, batch(image=values))["image"]
    assert np.isnan(image[0, 0, 0, 0])
    assert np.isinf(image[0, 0, 0, 1])


def test_a_strided_array_is_made_contiguous():
    values = np.zeros((2, 4, 4, 3), np.float32).transpose(0, 3, 1, 2)
    assert check_batch(SIGNATURE, batch(image=values))["image"].flags.c_contiguous


def test_lists_and_ignored_labels_are_taken():
    labels = check_batch(SIGNATURE, batch(labels=[-100, 4]))["labels"]
    np.testing.assert_array_equal(labels, [-100, 4])


def test_names_can_be_ignored():
    signature = GraphSignature(SIGNATURE.inputs[:1], ())
    assert list(check_batch(signature, {"image": batch()["image"], "labels": "unused"}, ignored=("labels",))) == ["image"]


def test_a_scalar_input_keeps_its_rank():
    signature = GraphSignature((Entry("temperature", Role.DATA, ir.DataType.FLOAT, ()),), ())
    assert check_batch(signature, {"temperature": 2.0})["temperature"].shape == ()


def test_hyperparameters_have_defaults_and_can_be_given():
    values = check_hyperparameters(SIGNATURE, {"decay": 1})
    assert values == {"lr": np.float32(0.1), "decay": np.float32(1)}
    assert check_hyperparameters(SIGNATURE, {"decay": 0.5, "lr": np.float64(3)})["lr"].dtype == np.float32


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({}, r"'decay' has no default: give it with every step, decay="),
        ({"lr": 10**400}, "'lr' is 1000.*: give one finite number that is not negative"),
        ({"decays": 1}, r"no hyperparameter 'decays' \(did you mean 'decay'\?\); a step of this program takes lr, decay"),
        ({"decay": "fast"}, r"'decay' is 'fast': give one finite number"),
        ({"decay": "0.1"}, r"'decay' is '0\.1': give one finite number"),
        ({"decay": None}, r"'decay' has no default: give it with every step, decay=\.\.\."),
        ({"decay": True}, r"'decay' is True: give one finite number"),
        ({"decay": -0.1}, r"'decay' is -0\.1: give one finite number that is not negative, such as decay=0\.01"),
        ({"decay": 1e300}, r"'decay' is 1e\+300: give one finite number"),
        ({"decay": float("nan")}, r"'decay' is nan: give one finite number"),
        ({"decay": [1.0, 2.0]}, r"'decay' is \[1.0, 2.0\]: give one finite number"),
    ],
)
def test_hyperparameters_that_do_not_fit_are_refused(given, message):
    with pytest.raises(ConfigurationError, match=message):
        check_hyperparameters(SIGNATURE, given)


def test_batches_of_one_form_are_checked_each():
    check = BatchCheck(SIGNATURE)
    given = batch()
    for _ in range(3):
        checked = check(given)
        assert list(checked) == ["image", "mask", "labels"]
        assert all(array is given[name] for name, array in checked.items())
    with pytest.raises(InputError, match="holds 10 at"):
        check(batch(labels=np.array([3, 10])))
    assert check(batch(labels=np.array([-100, 4])))["labels"].tolist() == [-100, 4]
    with pytest.raises(InputError, match="disagree about 'batch'"):
        check(batch(labels=np.array([3, 9, 1])))
    with pytest.raises(InputError, match="unexpected input"):
        check(batch(more=1))
    with pytest.raises(InputError, match="lacks the input 'labels'"):
        check(batch(labels=None))
    assert check(batch(labels=np.array([1, 2], np.int32)))["labels"].dtype == np.int64
    assert check(batch(labels=[1, 2]))["labels"].dtype == np.int64
    turned = batch(image=np.zeros((2, 4, 4, 3), np.float32).transpose(0, 3, 1, 2))
    assert check(turned)["image"].flags.c_contiguous
    assert check(given)["labels"] is given["labels"]


def test_hyperparameters_are_checked_whenever_others_are_given():
    check = HyperparameterCheck(SIGNATURE)
    first = check({"decay": 1.0})
    assert check({"decay": 1.0}) is first
    with pytest.raises(ConfigurationError, match="'decay' is True"):
        check({"decay": True})
    assert check({"decay": 0.5})["decay"] == np.float32(0.5)
    with pytest.raises(ConfigurationError, match="'decay' is nan"):
        check({"decay": float("nan")})
    with pytest.raises(ConfigurationError, match="'decay' has no default"):
        check({})


@pytest.mark.parametrize(
    ("extents", "shape", "says_how"),
    [((1, 3), (4, 3), True), ((5, 1, 3), (5, 4, 3), True), ((1, 1, 3), (1, 4, 3), False), ((8, 3), (4, 3), False)],
)
def test_a_batch_of_several_for_a_model_of_one_sample_says_what_to_do(extents, shape, says_how):
    signature = GraphSignature((Entry("x", Role.DATA, ir.DataType.FLOAT, extents),), ())
    with pytest.raises(InputError) as caught:
        check_batch(signature, {"x": np.zeros(shape, np.float32)})
    assert f"expected shape [{', '.join(map(str, extents))}], got" in str(caught.value)
    remedy = (
        "exported for one sample at a time: compile it with batch='open' (--batch open), which lets it take batches of any size, "
        "or export it again with an open batch (dynamic axes)"
    )
    assert str(caught.value).endswith(remedy) is says_how


def test_an_empty_cache_is_to_be_left_out():
    cache = Entry("past", Role.DATA, ir.DataType.FLOAT, ("batch", "past_length", 4))
    with pytest.raises(
        InputError, match=r"'past' is empty along axis 1 .*always empty, compile without it: bind=\{'past_length': 0\}"
    ):
        check_batch(GraphSignature((cache,), ()), {"past": np.zeros((2, 0, 4), np.float32)})
