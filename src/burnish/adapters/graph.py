"""What a model says of the adapters in it: small weights that train beside weights that stay as they are.

``burnish.surgery.lora`` writes it into the model's metadata, and everything after reads it there: what trains, what a checkpoint
holds, what an export merges.
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
        adapters: in the order of the graph.
        also_trained: initializers that are none of an adapter's and train by default too, such as those of a new head.
        names: initializer of them -> what the module calls it that reads it, where that differs.
    """

    adapters: tuple[Adapter, ...] = ()
    also_trained: tuple[str, ...] = ()
    names: Mapping[str, str] = field(default_factory=dict)

    def __bool__(self) -> bool:
        return bool(self.adapters)

    @property
    def parameters(self) -> tuple[str, ...]:
        """The initializers of the adapters, each once: nodes that read one weight may share them."""
        return tuple(dict.fromkeys(name for adapter in self.adapters for name in adapter.parameters.values()))

    @property
    def trained(self) -> tuple[str, ...]:
        """What trains by default."""
        return tuple(dict.fromkeys((*self.parameters, *self.also_trained)))

    def write(self, model: ir.Model) -> None:
        """Let a model say, in place, which adapters are in it; nothing where there are none."""
        if self.adapters:
            listed = [asdict(adapter) for adapter in self.adapters]
            entry = {"version": VERSION, "adapters": listed, "also_trained": list(self.also_trained)}
            entry |= {"names": dict(self.names)} if self.names else {}
            ADAPTERS.set(model, entry)
        else:
            ADAPTERS.remove(model)


def read_adapters(metadata: Mapping[str, str]) -> Adapters:
    """Return the adapters that a model's metadata lists; none where it lists none.

    Raises:
        ModelError: the entry is not what was written, or of a newer version.
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
    """Raise ValueError or TypeError for an entry of other kinds than were written."""
    kinds = {"str": str, "int": int, "float": (int, float), "bool": bool, "Mapping[str, str]": dict}
    for one in fields(adapter):
        if not isinstance(getattr(adapter, one.name), kinds[str(one.type)]):  # type: ignore[arg-type]
            raise TypeError(f"{one.name} is {getattr(adapter, one.name)!r}")
    variant = VARIANTS.get(adapter.variant)
    if variant is None or set(adapter.parameters) != set(variant.parts):
        raise ValueError(f"variant {adapter.variant!r} with the parameters {sorted(adapter.parameters)}")
    if adapter.rank < variant.has_rank or not all(isinstance(name, str) for name in adapter.parameters.values()):
        raise ValueError(f"rank {adapter.rank}")
