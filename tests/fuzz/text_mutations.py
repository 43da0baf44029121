"""What is done to texts: to tokens of any, and to the values of JSON."""

from __future__ import annotations

import json
import re
from random import Random
from typing import Any

ODD_TEXTS = (
    *(
        "",
        "-1",
        "0",
        "1_0",
        "１０",
        "1e999",
        "-1e39",
        "nan",
        "inf",
        "1,5",
        "1.234",
        "1,234",
        "0x10",
        "9" * 40,
        "9" * 5000,
        "\x00",
    ),
    *('"', "'", ",", ";", "\t", "\n", "\r\n", "\ufeff", "é", "\ud800", "=", ":", "[", "]", "{", "}", "(", "--", "#", "*" * 300),
    *("true", "None", "null", "2" * 18 + "GiB", "../..", "/dev/zero", "a" * 5000, "[" * 3000, "1e400", "²", "Infinity"),
)
ODD_VALUES: tuple[Any, ...] = (
    *(
        None,
        True,
        False,
        0,
        -1,
        1,
        2**31,
        2**63,
        -(2**63) - 1,
        10**400,
        1.5,
        -0.0,
        1e308,
        float("nan"),
        float("inf"),
        "",
        "a",
        "1",
    ),
    *("\ud800", "é" * 100, [], {}, [[]], {"a": {}}, [0] * 1000, ["a", 1, None]),
)
_TOKEN = re.compile(r"[\w.+-]+|\s|[^\w\s]")


def mutate_text(random: Random, content: bytes) -> tuple[bytes, str]:
    """Change tokens of a text; return it, and what was done."""
    tokens = _TOKEN.findall(content.decode("utf-8", "surrogateescape")) or [""]
    place, odd = random.randrange(len(tokens)), random.choice(ODD_TEXTS)
    match random.randrange(5):
        case 0:
            done = f"{tokens[place]!r} is {odd[:20]!r}"
            tokens[place] = odd
        case 1:
            done = f"{odd[:20]!r} before {tokens[place]!r}"
            tokens.insert(place, odd)
        case 2:
            done = f"without {tokens.pop(place)!r}"
        case 3:
            other = random.randrange(len(tokens))
            tokens[place], tokens[other] = tokens[other], tokens[place]
            done = f"{tokens[place]!r} and {tokens[other]!r} exchanged"
        case _:
            count = random.choice((2, 3, 1000))
            done = f"{tokens[place]!r} {count} times"
            tokens[place] *= count
    return "".join(tokens).encode("utf-8", "surrogatepass" if random.random() < 0.5 else "replace"), done


def mutate_json(random: Random, content: bytes) -> tuple[bytes, str]:
    """Change a value, key or element of a JSON text; of anything else, the text."""
    try:
        root = [json.loads(content)]
    except (ValueError, RecursionError):
        return mutate_text(random, content)
    holder, key = random.choice(list(_places(root)))
    done = f"{key!r}: "
    match random.randrange(6):
        case 0 if isinstance(holder, dict):
            del holder[key]
            done += "gone"
        case 1 if isinstance(holder, dict):
            other = random.choice(("", "a", f"{key} ", key.upper(), "\ud800", "__metadata__", key * 100))
            holder[other] = holder.pop(key)
            done += f"called {other[:20]!r}"
        case 2 if isinstance(holder, list):
            holder.insert(key, holder[key])
            done += "twice"
        case 3:
            deep: Any = holder[key]
            for _ in range(random.choice((1, 5, 200))):
                deep = [deep] if random.random() < 0.5 else {"a": deep}
            holder[key] = deep
            done += "deeper"
        case 4 if isinstance(holder[key], int | float) and not isinstance(holder[key], bool):
            step = random.choice((-1, 1, 0.5, 2**31, -(2**40), 8))
            holder[key] += step if abs(holder[key]) < 2**1000 else 1
            done += f"{holder[key]}"
        case 5 if isinstance(holder[key], str):
            changed, said = mutate_text(random, holder[key].encode("utf-8", "surrogatepass"))
            holder[key] = changed.decode("utf-8", "replace")
            done += said
        case _:
            holder[key] = random.choice(ODD_VALUES)
            done += repr(holder[key])[:30]
    return json.dumps(root[0], ensure_ascii=random.random() < 0.5).encode("utf-8", "surrogatepass"), done


def _places(value: Any) -> Any:
    """Where values are: what holds each, and under which key."""
    if isinstance(value, dict | list):
        for key in list(value) if isinstance(value, dict) else range(len(value)):
            yield value, key
            yield from _places(value[key])
