"""Checks of options that have a meaning for some kinds of data alone."""

from __future__ import annotations

import typer

from burnish.settings import is_natural_text, split


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
    from burnish.data.formats import format_of

    forms = {format_of(source): source for source in sources if source is not None}
    if not forms:
        raise typer.BadParameter(
            f"--label {label} names the column of a table that holds the labels, and no data are given: leave it out, or give "
            "--data"
        )
    form, source = next(iter(forms.items()))
    held = {each.holds for each in forms}
    has_columns = any(not each.labels for each in forms)
    if label is not None and not has_columns:
        raise typer.BadParameter(
            f"--label {label} names the column of a table (.csv, .parquet) that holds the labels, and '{source}' is "
            f"{form.short}, {form.labels}: leave it out"
        )
    if missing == "drop" and not has_columns:
        raise typer.BadParameter(
            f"--missing drop leaves out rows of a table (.csv, .parquet), and '{source}' is {form.short}: leave it out"
        )
    if image_size is not None and "images" not in held:
        raise typer.BadParameter(
            f"--image-size is what the files in a folder of images are resized to, and '{source}' is {form.short}, whose "
            "samples have a shape already: leave it out"
        )
    if pixels is not None and not held & {"images", "arrays"}:
        raise typer.BadParameter(
            f"{pixels} says what is done to the pixels of images and of arrays of bytes, and '{source}' is {form.short}, whose "
            "numbers are taken as they are: leave it out"
        )


def read_extents(texts: list[str]) -> dict[str, int]:
    """Return {name: extent} of ``NAME=N``.

    Raises:
        typer.BadParameter: a text is written otherwise.
    """
    extents = {}
    for text in split(texts):
        name, _, size = text.partition("=")
        if not name or not is_natural_text(size) or int(size) < 1:
            raise typer.BadParameter(f"--extent {text}: give NAME=N, such as sequence=16")
        extents[name] = int(size)
    return extents
