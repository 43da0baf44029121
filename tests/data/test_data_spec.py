"""Fitting samples and labels to what a program takes."""

from __future__ import annotations

import re

import numpy as np
import onnx_ir as ir
import pytest

from burnish.data import DataSpec
from burnish.data.data_spec import fit_data, fit_label
from burnish.data.preprocessing import image_layout
from burnish.errors import DataError
from burnish.program import Entry, Role
from specs.program_inputs import class_entry, data_entry, value_entry

images = np.arange(2 * 4 * 5, dtype=np.float32).reshape(2, 4, 5)
color = np.arange(2 * 4 * 5 * 3, dtype=np.float32).reshape(2, 4, 5, 3)


@pytest.mark.parametrize(
    ("array", "shape", "expected"),
    [
        (images, (4, 5), images),
        (images, ("height", "width"), images),
        (images, (1, 4, 5), images[:, None]),
        (images, (1, None, None), images[:, None]),
        (images, (4, 5, 1), images[..., None]),
        (images, (20,), images.reshape(2, 20)),
        (images.reshape(2, 20), (1, 4, 5), images[:, None]),
        (images[:, None], (4, 5, 1), images[..., None]),
        (color, (3, 4, 5), color.transpose(0, 3, 1, 2)),
        (color.transpose(0, 3, 1, 2), (4, 5, 3), color),
        (color, (3, "height", "width"), color.transpose(0, 3, 1, 2)),
        (np.float32([1, 2]), (1,), np.float32([[1], [2]])),
    ],
)
def test_samples_take_the_shape_of_the_input(array, shape, expected):
    fitted = fit_data(array, data_entry(*shape), "file")
    np.testing.assert_array_equal(fitted, expected)
    assert fitted.dtype == np.float32


@pytest.mark.parametrize("shape", [(3, 4, 5), (4, 6), (5, 4), (21,), ("time", 7), (4, 5, 1, 1, 2)])
def test_samples_of_another_shape_are_refused_with_both_shapes(shape):
    wanted = "[" + ", ".join(str(extent) for extent in shape) + "]"
    with pytest.raises(DataError, match=re.escape(f"file: 'x' wants samples of shape {wanted}") + r".*\[4, 5\]"):
        fit_data(images, data_entry(*shape), "file")


def test_bytes_become_fractions_of_255():
    fitted = fit_data(np.uint8([[0, 51, 255]]), data_entry(3), "file")
    np.testing.assert_array_equal(fitted, np.float32([[0, 51 / np.float32(255), 1]]))


def test_bytes_stay_where_the_model_takes_bytes():
    array = np.uint8([[0, 51, 255]])
    assert fit_data(array, data_entry(3, dtype=ir.DataType.UINT8), "file") is array


def test_other_integers_are_not_scaled():
    np.testing.assert_array_equal(fit_data(np.int32([[7, -3]]), data_entry(2), "file"), np.float32([[7, -3]]))


def test_whole_floats_fill_an_integer_input_and_fractions_do_not():
    entry = data_entry(2, name="tokens", dtype=ir.DataType.INT32)
    fitted = fit_data(np.float64([[1, 2]]), entry, "file")
    assert fitted.dtype == np.int32
    for wrong in ([[1, 2.5]], [[1, 3e9]]):
        message = f"'tokens' takes int32, and the data hold {wrong[0][1]}: give whole numbers in its range"
        with pytest.raises(DataError, match=re.escape(message)):
            fit_data(np.float64(wrong), entry, "file")


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_a_value_that_is_not_finite_is_named_by_its_sample(value):
    array = np.zeros((4, 2))
    array[2, 1] = value
    with pytest.raises(DataError, match="file: sample 2 holds a NaN or infinite value for input 'x'"):
        fit_data(array, data_entry(2), "file")


@pytest.mark.parametrize("array", [np.array([["a"]]), np.array([[None]], dtype=object), np.zeros((1, 1), dtype="M8[s]")])
def test_what_is_no_number_is_refused(array):
    with pytest.raises(DataError, match=r"file: input 'x' is to be filled with values of dtype .*; give numbers"):
        fit_data(array, data_entry(1), "file")


def test_class_names_are_numbered_in_sorted_order():
    labels, names = fit_label(np.array(["dog", "ant", "dog", "cat"]), class_entry(), "file")
    assert labels.tolist() == [2, 0, 2, 1]
    assert labels.dtype == np.int64
    assert names == ("ant", "cat", "dog")


def test_class_names_keep_the_numbers_of_the_training_data():
    labels, names = fit_label(np.array(["dog", "cat"]), class_entry(), "file", classes=("dog", "ant", "cat"))
    assert labels.tolist() == [0, 2]
    assert names == ("dog", "ant", "cat")
    with pytest.raises(DataError, match="file: class 'emu' is not among the classes that are trained: dog, cat"):
        fit_label(np.array(["dog", "emu"]), class_entry(), "file", classes=("dog", "cat"))


@pytest.mark.parametrize("labels", [np.uint8([0, 2]), np.float32([0, 2]), np.int32([[0], [2]]), np.array([0, 2])])
def test_class_indices_become_int64(labels):
    fitted, names = fit_label(labels, class_entry(), "file")
    assert (fitted.tolist(), fitted.dtype, names) == ([0, 2], np.int64, None)


def test_labels_of_pixels_keep_their_shape():
    labels = np.random.default_rng(0).integers(0, 3, (2, 4, 4))
    np.testing.assert_array_equal(fit_label(labels, class_entry(3, "height", "width"), "file")[0], labels)


@pytest.mark.parametrize(("labels", "sample", "value"), [([0, 3, 1], 1, 3), ([0, 1, -1], 2, -1)])
def test_a_label_out_of_range_is_named(labels, sample, value):
    with pytest.raises(DataError, match=f"file: sample {sample} has the label {value}, and 'labels' takes 0 to 2"):
        fit_label(np.array(labels), class_entry(), "file")


def test_the_ignored_label_is_allowed():
    labels, _ = fit_label(np.array([0, -100]), class_entry(ignored=-100), "file")
    assert labels.tolist() == [0, -100]


def test_labels_that_are_all_ignored_are_refused():
    with pytest.raises(DataError, match="file: every label is -100, which the loss ignores, so nothing would train: give"):
        fit_label(np.full(3, -100), class_entry(ignored=-100), "file")


def test_more_class_names_than_the_model_has_outputs():
    with pytest.raises(DataError, match=r"file: 4 classes \(a \.\.\. d\), and the model has 3; take a model"):
        fit_label(np.array(list("abcd")), class_entry(), "file")


def test_fractions_are_no_class_indices():
    with pytest.raises(DataError, match=r"hold 0\.5: give whole numbers in its range, or choose a loss of real numbers"):
        fit_label(np.array([0.5, 1]), class_entry(), "file")


def test_values_to_compare_with():
    targets, names = fit_label(np.array([1, 2]), value_entry(1), "file")
    np.testing.assert_array_equal(targets, np.float32([[1], [2]]))
    assert names is None
    with pytest.raises(DataError, match=r"the labels are text, and the loss compares with numbers \('targets'\)"):
        fit_label(np.array(["a"]), value_entry(), "file")


@pytest.mark.parametrize(
    ("shape", "layout"),
    [
        ((3, 4, 5), ("NCHW", 3, 4, 5)),
        ((1, "height", "width"), ("NCHW", 1, None, None)),
        ((4, 5, 3), ("NHWC", 3, 4, 5)),
        ((4, 5), ("NHW", 1, 4, 5)),
    ],
)
def test_the_layout_of_images(shape, layout):
    assert image_layout(data_entry(*shape), "folder") == layout


@pytest.mark.parametrize("shape", [(7, 4, 5), (20,), (2, 3, 4, 5)])
def test_an_input_that_takes_no_images(shape):
    with pytest.raises(DataError, match=r"folder: the model's input 'x' has shape \[batch, .*which is not that of images"):
        image_layout(data_entry(*shape), "folder")


def test_a_format_with_one_kind_of_features_refuses_a_model_with_two_inputs():
    wanted = DataSpec((data_entry(1), data_entry(1, name="z")), class_entry())
    with pytest.raises(DataError, match=r"file: the model's inputs are 'x', 'z', and this format fills exactly one"):
        wanted.dataset(np.zeros((1, 1)), np.zeros(1), "file")


def test_a_format_with_labels_refuses_a_loss_without():
    with pytest.raises(DataError, match="file: the loss of this model takes no labels"):
        DataSpec((data_entry(1),), None).dataset(np.zeros((1, 1)), np.zeros(1), "file")


def test_indices_beyond_an_embedding():
    entry = Entry("ids", Role.DATA, ir.DataType.INT64, ("batch", 2), minimum=-5, maximum=4)
    given = np.array([[0, 4], [-5, 1], [5, 0]])
    assert fit_data(given[:2], entry, "file").tolist() == given[:2].tolist()
    with pytest.raises(DataError, match=r"file: sample 2 holds 5 for input 'ids', which takes -5 to 4; number them as the model"):
        fit_data(given, entry, "file")
