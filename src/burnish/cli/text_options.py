"""Options that say how texts become tokens and what is learned of them, and what they come to."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

import typer

from burnish.cli.compilation_options import Compilation
from burnish.cli.option_groups import OptionGroup
from burnish.settings import read_whole, split

if TYPE_CHECKING:
    from burnish.data import DataDescription, Text

TOKENIZER = "tokenizer.json"
"""What a run calls its copy of the tokenizer."""
LANGUAGE_LOSS = "cross_entropy:class_axis=-1"
LANGUAGE_METRICS = ("accuracy", "perplexity")


@dataclass(frozen=True)
class TextOptions(OptionGroup):
    """How texts become tokens."""

    panel: ClassVar = "Texts"
    tokenizer: Annotated[
        Path | None,
        typer.Option(
            "--tokenizer",
            metavar="FILE",
            help="A tokenizer.json of Hugging Face, which makes tokens of texts; by default the one in the folder of a run.",
            show_default=False,
        ),
    ] = None
    task: Annotated[
        str | None,
        typer.Option(
            "--task",
            help="What is learned of texts: label, their labels; masked, tokens that are masked; causal, the next token.",
            show_default=False,
        ),
    ] = None
    max_tokens: Annotated[
        int | None,
        typer.Option("--max-tokens", min=2, help="Tokens that a text has at most; by default what the model says, else 512."),
    ] = None
    buckets: Annotated[
        str | None,
        typer.Option(
            "--buckets",
            metavar="LENGTHS",
            help="The lengths that batches are padded to, such as 32,64,128; by default powers of two.",
        ),
    ] = None
    too_long: Annotated[
        str, typer.Option("--too-long", help="What becomes of a longer text: cut, which counts it, or error.")
    ] = "cut"
    joined: Annotated[
        bool, typer.Option("--joined", help="Let texts follow each other, and cut them into pieces of one length.")
    ] = False
    masked_share: Annotated[float, typer.Option("--masked-share", help="Of the tokens, for the task masked.")] = 0.15
    text_column: Annotated[
        str | None, typer.Option("--text-column", metavar="NAME", help="Column of a table that holds the texts.")
    ] = None

    def settings(self) -> Text | None:
        """Return these options as ``burnish.data.open_dataset`` takes them; None where the command line names none.

        Raises:
            typer.BadParameter: buckets that are no whole numbers.
            ConfigurationError: an option out of range.
        """
        if self.first_named is None:
            return None
        from burnish.data import Text

        return Text(
            tokenizer=self.tokenizer,
            task=self.task,
            length=self.max_tokens,
            buckets=_lengths(self.buckets),
            too_long=self.too_long,
            joined=self.joined,
            masked_share=self.masked_share,
            column=self.text_column,
        )

    def settings_for(self, model: Path, data: str, described: DataDescription) -> Text | None:
        """Return the same for a model that is trained: it says how its texts were read, and its run has the tokenizer.

        Args:
            model: a run, or a file in its folder.
            data: what the model reads.
            described: what it says of the data that it was trained on.
        """
        from burnish.data import Text
        from burnish.data.formats import format_of

        asked, known = self.settings(), described.text
        if asked is None and (known is None or known.task is None or format_of(data).holds not in ("table", "texts")):
            return None
        text = asked or Text(joined=known.joined, task=known.task) if known else asked
        beside = next((each / TOKENIZER for each in (model, *model.parents[:2]) if (each / TOKENIZER).is_file()), None)
        return text if text is None or text.tokenizer is not None or beside is None else replace(text, tokenizer=beside)


def for_language(compilation: Compilation, options: TextOptions) -> Compilation:
    """Return the options of compilation with the loss and the metrics of a language model, where these are left open."""
    if options.task not in ("masked", "causal"):
        return compilation
    chosen: dict[str, Any] = {} if "loss" in compilation.named else {"loss": LANGUAGE_LOSS}
    if "metrics" not in compilation.named:
        chosen["metrics"] = LANGUAGE_METRICS
    return replace(compilation, options=replace(compilation.options, **chosen))


def _lengths(text: str | None) -> tuple[int, ...] | None:
    if text is None:
        return None
    try:
        return tuple(read_whole(part) for part in split([text]))
    except ValueError:
        raise typer.BadParameter(f"--buckets {text}: give whole numbers with commas between, such as 32,64,128") from None
