"""The options of exchanges between workers, each declared once, for ``burnish.DataParallel`` and the command line.

Nothing heavy is imported here, because the command line's help lists these options.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from burnish.compiler.options import read_tables
from burnish.options import option


@dataclass(frozen=True, kw_only=True)
class ExchangeOptions:
    """Options for exchanging gradients, statistics and the optimizer's state; ``DataParallel`` documents each."""

    deterministic: bool = option(
        False, help="Sum over workers in the order of their ranks, for the same bits in every run.", kind=bool
    )
    compression: str | None = option(None, help="Send gradients in 16 bits: float16 or bfloat16.", metavar="TYPE")
    bucket_size: int = option(
        25 * 2**20,
        help="Bytes of gradients in one exchange, which overlaps with the backward pass.",
        metavar="BYTES",
        kind=int,
        least=1,
    )
    share: bool = option(
        True,
        help="Let independent batch normalization layers share an exchange.",
        spelled="--share/--no-share",
        kind=bool,
    )
    shard_optimizer: bool = option(
        False, help="Let each worker keep the optimizer state of only a share of the parameters.", kind=bool
    )
    shard_tables: str | Sequence[str] | None = option(
        None,
        help="Let each worker keep only some rows of a --sparse table: auto, or a name or pattern; repeatable.",
        metavar="NAME",
        several=True,
        read=read_tables,
    )
    statistics: str = option(
        "mean",
        help="Running statistics if those of workers differ: their mean, or those of rank0.",
        metavar="KIND",
    )
    synchronize_every: int | None = option(
        None, help="Let workers step alone for this many steps, then average their weights.", metavar="STEPS", kind=int, least=1
    )
