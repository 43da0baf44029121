"""Checks of options that have a meaning for some kinds of data alone."""

from __future__ import annotations

import typer

NAMES = {
    "digits": "scikit-learn's digits",
    "npz": "an .npz file",
    "npy": "a folder of .npy files",
    "tar": "tar archives of images",
    "images": "a folder of images",
    "coco": "a COCO folder",
    "voc": "a PASCAL VOC folder",
    "masks": "a folder of images and masks",
    "csv": "a .csv file",
    "parquet": "a .parquet file",
    "txt": "a file of texts",
    "jsonl": "a .jsonl file",
}
IMAGES = {"images", "tar", "coco", "voc", "masks"}
LABELS = {
    "digits": "which know theirs",
    "npz": "whose labels are the array y, or that of the loss's input",
    "npy": "whose labels are y.npy, or that of the loss's input",
    "tar": "whose classes are in files beside them",
    "images": "whose classes are its subfolders",
    "coco": "which has its annotations",
    "voc": "which has its annotations",
    "masks": "whose labels are the masks",
    "txt": "whose labels come before a tab in each line",
}


def check_data_options(
    *sources: str | None,
    label: str | None = None,
    image_size: tuple[int, int] | None = None,
    pixels: str | None = None,
    missing: str | None = None,
) -> None:
    """Refuse options that mean nothing for any of the data.

    Args:
        sources: the data to train and to evaluate on, as ``burnish.data.open_dataset`` takes them; None where there are none.
        label: of ``--label``.
        image_size: of ``--image-size``.
        pixels: the first of the options of pixels that was given.
        missing: of ``--missing``.

    Raises:
        DataError: there are no such data.
        typer.BadParameter: an option without a meaning; the message names it, the data, and what it is for.
    """
    if label is None and image_size is None and pixels is None and missing != "drop":
        return
    from burnish.data.sources import data_kind

    kinds = {data_kind(source): source for source in sources if source is not None}
    if not kinds:
        raise typer.BadParameter(
            f"--label {label} names the column of a table that holds the labels, and no data are given: leave it out, or give "
            "--data"
        )
    kind, source = next(iter(kinds.items()))
    if label is not None and not kinds.keys() & {"csv", "parquet", "jsonl"}:
        raise typer.BadParameter(
            f"--label {label} names the column of a table (.csv, .parquet) that holds the labels, and '{source}' is "
            f"{NAMES[kind]}, {LABELS[kind]}: leave it out"
        )
    if missing == "drop" and not kinds.keys() & {"csv", "parquet", "jsonl"}:
        raise typer.BadParameter(
            f"--missing drop leaves out rows of a table (.csv, .parquet), and '{source}' is {NAMES[kind]}: leave it out"
        )
    if image_size is not None and not kinds.keys() & IMAGES:
        raise typer.BadParameter(
            f"--image-size is what the files in a folder of images are resized to, and '{source}' is {NAMES[kind]}, whose "
            "samples have a shape already: leave it out"
        )
    if pixels is not None and not kinds.keys() & (IMAGES | {"npz", "npy"}):
        raise typer.BadParameter(
            f"{pixels} says what is done to the pixels of images and of arrays of bytes, and '{source}' is {NAMES[kind]}, whose "
            "numbers are taken as they are: leave it out"
        )
