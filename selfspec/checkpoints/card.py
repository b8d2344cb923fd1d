"""The README that a drafter's folder begins with."""

from __future__ import annotations

from pathlib import Path

from selfspec.utils.files import Figures


def card(meta: Figures, note: str) -> str:
    """meta: of drafter.json; note: what its maker adds."""
    config = "\n".join(f"- {key}: {value}" for key, value in meta["config"].items())
    target = meta["target"]["name"]
    if Path(target).is_absolute() or target.startswith("../"):
        target = Path(target).name  # a path means nothing to others
    return f"""---
library_name: selfspec
base_model: {target}
tags: [speculative-decoding, {meta["kind"]}]
---
# {meta["kind"]} drafter for {target}

Drafting parts for self-speculative decoding: {meta["parameters"]:,} parameters beside a frozen target. They change how
many passes the target takes. In float32 every token is that of plain decoding with the same seed;
in bfloat16 a near-tie of the target's logits can fall either way.

```python
import selfspec

spec = selfspec.load("path/to/this/folder")
```

{config}
- target weights (SHA-256 in bfloat16): {meta["target"]["weights_hash"]}

{note}
"""
