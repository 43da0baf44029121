"""The list of a model's adapters (small weights that train next to frozen ones), kept in the model's metadata.

``burnish.surgery.lora`` writes the list. The compiler, checkpoints and exports read it to choose weights to train, save or merge.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields

import onnx_ir as ir

from burnish.adapters.variants import VARIANTS, Adapter
from burnish.errors import ModelError
from burnish.graph.annotations import ADAPTERS
from burnish.untrusted_files import UNREADABLE

VERSION = 1


@dataclass(frozen=True)
class Adapters:
    """The adapters of a model.

    Attributes:
        adapters: in graph order.
        also_trained: other initializers that train by default, such as those of a new head.
        names: names in the PyTorch module, by initializer, if they differ.
    """

    adapters: tuple[Adapter, ...] = ()
    also_trained: tuple[str, ...] = ()
    names: Mapping[str, str] = field(default_factory=dict)

    def __bool__(self) -> bool:
        return bool(self.adapters)

    @property
    def parameters(self) -> tuple[str, ...]:
        """The initializers of the adapters, without duplicates: nodes with a shared weight may share an adapter."""
        return tuple(dict.fromkeys(name for adapter in self.adapters for name in adapter.parameters.values()))

    @property
    def trained(self) -> tuple[str, ...]:
        """The initializers that train by default."""
        return tuple(dict.fromkeys((*self.parameters, *self.also_trained)))

    def write(self, model: ir.Model) -> None:
        """Write the list into the metadata of a model, or remove it if it is empty."""
        if self.adapters:
            listed = [asdict(adapter) for adapter in self.adapters]
            entry = {"version": VERSION, "adapters": listed, "also_trained": list(self.also_trained)}
            entry |= {"names": dict(self.names)} if self.names else {}
            ADAPTERS.set(model, entry)
        else:
            ADAPTERS.remove(model)


def read_adapters(metadata: Mapping[str, str]) -> Adapters:
    """Read the list from a model's metadata; it is empty if there is no entry.

    Raises:
        ModelError: the entry is damaged, or of a newer version.
    """
    if ADAPTERS.key not in metadata:
        return Adapters()
    try:
        entry = ADAPTERS.read(metadata[ADAPTERS.key])
        version = int(entry["version"])
        if version <= VERSION:
            listed = tuple(Adapter(**dict(each)) for each in entry["adapters"])
            adapters = Adapters(listed, tuple(entry["also_trained"]), dict(entry.get("names", {})))
            for adapter in adapters.adapters:
                _check(adapter)
            if not all(isinstance(name, str) for name in (*adapters.also_trained, *adapters.names, *adapters.names.values())):
                raise TypeError("also_trained is no list of names")
            return adapters
    except UNREADABLE as error:
        raise ModelError(
            f"the model's metadata '{ADAPTERS.key}' cannot be read ({error!r}): make the model again with burnish.surgery.lora, "
            "or remove that entry, and its adapters are weights as others are"
        ) from error
    raise ModelError(
        f"the model's adapters are noted in version {version}, and this burnish reads up to {VERSION}: update burnish"
    )


def _check(adapter: Adapter) -> None:
    """Raise ValueError or TypeError if a field has the wrong type or value."""
    kinds = {"str": str, "int": int, "float": (int, float), "bool": bool, "Mapping[str, str]": dict}
    for one in fields(adapter):
        if not isinstance(getattr(adapter, one.name), kinds[str(one.type)]):  # type: ignore[arg-type]
            raise TypeError(f"{one.name} is {getattr(adapter, one.name)!r}")
    variant = VARIANTS.get(adapter.variant)
    if variant is None or set(adapter.parameters) != set(variant.parts):
        raise ValueError(f"variant {adapter.variant!r} with the parameters {sorted(adapter.parameters)}")
    if adapter.rank < variant.has_rank or not all(isinstance(name, str) for name in adapter.parameters.values()):
        raise ValueError(f"rank {adapter.rank}")
