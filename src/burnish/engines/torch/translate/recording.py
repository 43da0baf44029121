"""Functions that a graph calls as they are: what they do depends on sizes that are known only when it runs."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import ParamSpec, TypeVar

from torch.overrides import handle_torch_function, has_torch_function

Parameters = ParamSpec("Parameters")
Result = TypeVar("Result")


def records_one_call(function: Callable[Parameters, Result]) -> Callable[Parameters, Result]:
    """Let a graph that is being made record one call of a function, in place of the calls that the function makes.

    The graph calls the function itself, which then looks for no proxies. While the graph is made, what the function returns is a
    proxy, be it of a tuple.
    """

    @functools.wraps(function)
    def run(*arguments: Parameters.args, **named: Parameters.kwargs) -> Result:
        if has_torch_function(arguments):
            return handle_torch_function(function, arguments, *arguments, **named)
        return function(*arguments, **named)

    return run
