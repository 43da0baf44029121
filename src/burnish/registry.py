"""Registry of named classes and functions, created from text, options or objects."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from types import FunctionType
from typing import Any, Generic, TypeVar

from burnish.errors import ConfigurationError
from burnish.settings import check_settings, read_settings, suggestion, with_settings

Made = TypeVar("Made")


class Registry(dict[str, Callable[..., Made]], Generic[Made]):
    """Constructors of one kind of object, by name. Add your own as in any dictionary.

    Texts have the form ``name`` or ``name:setting=value,setting=value``; each value is parsed as JSON if possible, and is text
    otherwise. Options are a mapping with ``name`` and the settings.

    Args:
        kind: the kind of object, for messages: ``loss``.
        makers: functions and classes by name.
        home: where a user finds objects of the kind: ``burnish.losses``.
        is_made: returns True for an object of the kind.
        unlisted: additional makers that need settings; messages do not list them.
        bare: True if the first setting may be given without its name: ``ghost:32``.
    """

    def __init__(
        self,
        kind: str,
        makers: Mapping[str, Callable[..., Made]],
        *,
        home: str = "",
        is_made: Callable[[Any], bool] = lambda given: False,
        unlisted: Mapping[str, Callable[..., Made]] | None = None,
        bare: bool = False,
    ):
        super().__init__(makers)
        self.kind, self.unlisted = kind, unlisted or {}
        self._home, self._is_made, self._bare = home, is_made, bare

    def resolve(self, given: object) -> Made:
        """Return the object that a text or options describe; an object of the kind is returned unchanged.

        Raises:
            ConfigurationError: the name or a setting is unknown, a setting is missing, repeated or invalid, or ``given`` has
                another type.
        """
        if isinstance(given, str):
            return self.make(*self.read(given))
        if isinstance(given, Mapping):
            if "name" not in given:
                has = ", ".join(map(repr, given)) or "nothing"
                raise ConfigurationError(f"the options of {self._article} have a 'name', and these have only {has}")
            return self.make(given["name"], {key: value for key, value in given.items() if key != "name"})
        if not isinstance(given, type | FunctionType) and self._is_made(given):
            made: Made = given  # type: ignore[assignment]
            return made
        objects = f" or an object of {self._home}" if self._home else ""
        raise ConfigurationError(f"{self._article} is a name{objects}, not {self._described(given)}; {self._choice()}")

    def read(self, text: str) -> tuple[str, dict[str, Any]]:
        """Parse a text into a name and its settings.

        Raises:
            ConfigurationError: the name is unknown, or the settings have the wrong form.
        """
        takes = self.takes(text.partition(":")[0].strip())
        positional = [setting for setting, one in takes.items() if one.kind is one.POSITIONAL_OR_KEYWORD]
        return read_settings(self.kind, text, next(iter(positional), "") if self._bare else None)

    def make(self, name: str, settings: Mapping[str, Any]) -> Made:
        """Return a new object from its name and settings."""
        return with_settings(f"{self.kind} '{name}'", self._maker(name), settings)

    def check(self, name: str, settings: Mapping[str, Any]) -> None:
        """Raise ConfigurationError if a setting is unknown or a required one is missing."""
        check_settings(f"{self.kind} '{name}'", self._maker(name), settings)

    def takes(self, name: str) -> Mapping[str, inspect.Parameter]:
        """Return the parameters of a name, by setting."""
        return inspect.signature(self._maker(name)).parameters

    def _maker(self, name: str) -> Callable[..., Made]:
        maker = super().get(name) or self.unlisted.get(name)
        if maker is None:
            raise ConfigurationError(f"there is no {self.kind} '{name}'{suggestion(name, self)}; {self._choice()}")
        return maker

    def _choice(self) -> str:
        return f"choose among {', '.join(sorted(self))}"

    @property
    def _article(self) -> str:
        return f"{'an' if self.kind[0] in 'aeiou' else 'a'} {self.kind}"

    def _described(self, given: object) -> str:
        if not isinstance(given, type | FunctionType):
            return repr(given)
        what = "class" if isinstance(given, type) else "function"
        name = next((name for name, maker in (*self.items(), *self.unlisted.items()) if maker is given), given.__name__)
        return f"the {what} '{given.__name__}': call it, as in {self._home}.{name}(...)"
