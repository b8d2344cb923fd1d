"""What `custom_generate/generate.py` of an exported folder calls: transformers' generate with selfspec's loop inside.

`selfspec.json` in the folder says who drafts: its own `drafter`, alone or joined by + with kinds that train nothing.
"""

from __future__ import annotations

import json
from pathlib import Path
from threading import Lock
from typing import Any

from torch import Tensor
from transformers import GenerationConfig, PreTrainedModel

from selfspec.api import Spec
from selfspec.hub import fetch
from selfspec.loading import find_drafter, joined, load_target
from selfspec.log import Figures

FILE = "selfspec.json"
OWN = "drafter"  # the folder's own, beside kinds that train nothing
_OPENING = Lock()


class _Kept:
    """A Spec and its default nodes, kept with the model. Copying the model does not copy them."""

    def __init__(self, spec: Spec, nodes: int | str | None) -> None:
        self.spec, self.nodes = spec, nodes

    def __deepcopy__(self, memo: Figures) -> _Kept:
        return self


def generate(model: PreTrainedModel, inputs: Tensor | None = None, **arguments: Any) -> Any:
    """`model.generate(inputs, **arguments)` by speculative decoding, for a model that was loaded from an exported
    folder. The first call loads the drafter and freezes the model. Further arguments: seed and nodes (see
    `Spec.__call__`).

    Raises ValueError for a model from elsewhere, and for what speculative decoding can not serve.
    """
    with _OPENING:
        kept: _Kept | None = vars(model).get("_selfspec")
        if kept is None or kept.spec.target.model is not model:  # a copy of the model has the original's
            kept = _opened(model)
            vars(model)["_selfspec"] = kept
    for name in ("custom_generate", "trust_remote_code"):  # which led here
        arguments.pop(name, None)
    if arguments.get("nodes") is None:
        arguments["nodes"] = kept.nodes
    config = arguments.get("generation_config")
    if config is not None and config.stop_strings is not None:
        # transformers does not hand its tokenizer on to custom callables, and then refuses these strings
        arguments["generation_config"] = config = GenerationConfig.from_dict(config.to_dict())
        arguments["stop_strings"], config.stop_strings = config.stop_strings, None
    # Not `model.generate`, which is this function where the model was loaded with trust_remote_code
    return type(model).generate(model, inputs, custom_generate=kept.spec, **arguments)  # type: ignore[attr-defined]


def _opened(model: PreTrainedModel) -> _Kept:
    name = str(model.config.name_or_path)
    folder = Path(name)
    if not folder.is_dir():
        folder = fetch(name, getattr(model.config, "_commit_hash", None))
    if not (folder / FILE).is_file():
        raise ValueError(
            f"the model was loaded from {name!r}, which is no folder that python -m selfspec export --to transformers "
            f"wrote ({FILE} is missing); load the model from the folder that custom_generate names"
        )
    told = json.loads((folder / FILE).read_text())
    target, tokenizer = load_target(model)
    members = {
        part: find_drafter(str(folder / part) if part == OWN else part, target, tokenizer)
        for part in told["drafter"].split("+")
    }
    return _Kept(Spec(target, joined(target, members), tokenizer), told["nodes"])
