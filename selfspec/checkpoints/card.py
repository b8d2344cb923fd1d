"""The README that a drafter's folder begins with."""

from __future__ import annotations

import html
import json
import re
from pathlib import Path
from typing import Any

from selfspec.utils.errors import visible
from selfspec.utils.exactness import STORY
from selfspec.utils.files import Figures

PLACE = "path/to/this/folder"  # in a card, until it is uploaded


def in_markdown(value: Any) -> str:
    """A value as text of one line in Markdown or in a table of it: no tags, no cells of its own."""
    return html.escape(visible(" ".join(str(value).split())), quote=False).replace("|", "&#124;")


def repository(name: str) -> str | None:
    """The name of a target, where it is one of a repository of the hub: the hub takes no path."""
    return name if re.fullmatch(r"[\w.-]+/[\w.-]+", name) and not Path(name).exists() else None


def is_path(name: str) -> bool:
    """Whether a target is named by a path, which means nothing to others."""
    return Path(name).is_absolute() or name.startswith("../")


def card(meta: Figures, note: str) -> str:
    """meta: of drafter.json; note: what its maker adds."""
    config = "\n".join(
        f"- {in_markdown(key)}: {in_markdown(value)}" for key, value in meta["config"].items() if value is not None
    )
    name, kind = str(meta["target"]["name"]), in_markdown(meta["kind"])
    base = "" if repository(name) is None else f"base_model: {name}\n"
    target = in_markdown(Path(name).name if is_path(name) else name)
    more = f', target="path/to/{target}"' if is_path(name) else ""
    own = "." in meta["kind"]  # of another package
    more += ", trust_code=True" if own else ""
    needs = f"\nIt needs the Python package `{kind.partition('.')[0]}`, which holds the class.\n" if own else ""
    return f"""---
library_name: selfspec
{base}tags: [speculative-decoding, {json.dumps(meta["kind"])}]
---
# {kind} drafter for {target}

Drafting parts for self-speculative decoding: {meta["parameters"]:,} parameters beside a frozen target. They change how
many passes the target takes. {STORY}

```python
import selfspec

spec = selfspec.load("{PLACE}"{more})
```
{needs}
{config}
- target weights (SHA-256 in bfloat16): {meta["target"]["weights_hash"]}

{note}
"""
