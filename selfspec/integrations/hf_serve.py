"""What `custom_generate/generate.py` of an exported folder calls: transformers' generate with selfspec's loop inside.

`selfspec.json` in the folder says who drafts: its own `drafter`, alone or joined by + with kinds that train nothing.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from threading import Lock
from typing import Any

from torch import Tensor
from transformers import GenerationConfig, PreTrainedModel

from selfspec.api import Spec
from selfspec.checkpoints.find import EXPORTED, OWN
from selfspec.checkpoints.hub import fetch
from selfspec.checkpoints.load_target import load_target
from selfspec.checkpoints.loading import find_drafter, joined, untrained
from selfspec.utils.files import Figures, read_json

_OPENING = Lock()
_CALLS: dict[int, list[Any]] = {}  # by the id of a model's config: calls under way, and its stop strings
_SERVER = "transformers.cli.serving.utils"  # of transformers serve


class _Kept:
    """A Spec and its default nodes, kept with the model. Copying the model does not copy them."""

    def __init__(self, spec: Spec, nodes: int | str | None) -> None:
        self.spec, self.nodes = spec, nodes

    def __deepcopy__(self, memo: Figures) -> _Kept:
        return self


def generate(model: PreTrainedModel, inputs: Tensor | None = None, **arguments: Any) -> Any:
    """`model.generate(inputs, **arguments)` by speculative decoding, for a model that was loaded from an exported
    folder. The first call loads the drafter. Further arguments: seed and nodes (see `Spec.__call__`). Dropout is off
    during the call; afterwards the model is as it was.

    Raises ValueError for a model from elsewhere, and for what speculative decoding can not serve.
    """
    training = [module for module in model.modules() if module.training]
    model.eval()
    try:
        if arguments.get("token_healing") or getattr(arguments.get("generation_config"), "token_healing", False):
            raise ValueError(
                "token_healing can not be served: transformers heals before it hands a prompt over, and keeps its "
                "tokenizer"
            )
        with _own_stops(model.generation_config) as strings:
            return _generated(model, inputs, arguments, strings)
    except ValueError as error:
        raise _refusal(error) from error
    finally:
        for module in training:
            module.training = True


@contextmanager
def _own_stops(config: GenerationConfig) -> Iterator[str | list[str] | None]:
    """The stop strings of a model's own config, which is without them while calls are under way: transformers does not
    hand its tokenizer on to custom callables, and then refuses these strings."""
    with _OPENING:
        calls = _CALLS.setdefault(id(config), [0, config.stop_strings])
        calls[0], config.stop_strings = calls[0] + 1, None
    try:
        yield calls[1]
    finally:
        with _OPENING:
            calls[0] -= 1
            if not calls[0]:
                config.stop_strings = calls[1]
                del _CALLS[id(config)]


def _refusal(error: ValueError) -> ValueError:
    """The error, in a server as one that answers 400 with its text, where any other error would be 500 without it."""
    if "starlette" not in sys.modules:
        return error
    from starlette.exceptions import HTTPException

    class Refusal(ValueError, HTTPException):
        def __str__(self) -> str:
            return str(error)

    refusal = Refusal(400)
    HTTPException.__init__(refusal, 400, str(error))
    return refusal


def _generated(
    model: PreTrainedModel, inputs: Tensor | None, arguments: dict[str, Any], strings: str | list[str] | None
) -> Any:
    """strings: the model's own stop strings, for a call that has none."""
    with _OPENING:
        cached: _Kept | None = vars(model).get("_selfspec")
        # A copy of the model has the original's; one that was cast or moved since needs another
        if cached is None or cached.spec.target.model is not model or cached.spec.target.changes.moved:
            cached = _opened(model)
            vars(model)["_selfspec"] = cached
    for name in ("custom_generate", "trust_remote_code"):  # which led here
        arguments.pop(name, None)
    if arguments.get("nodes") is None:
        arguments["nodes"] = cached.nodes
    config = arguments.get("generation_config")
    ids, most = arguments.get("input_ids", inputs), cached.spec.target.max_positions
    if _SERVER in sys.modules and config is not None and config.max_new_tokens and most is not None and ids is not None:
        # It compares the answer with this object of the request, and would take what the last position cut for finished
        room = most - ids.shape[-1]
        if 0 < room < config.max_new_tokens:
            config.max_new_tokens = room
    if config is not None and config.stop_strings is not None:
        arguments["generation_config"] = GenerationConfig.from_dict({**config.to_dict(), "stop_strings": None})
        strings = config.stop_strings
    if arguments.get("stop_strings") is None:
        arguments["stop_strings"] = strings
    # Not `model.generate`, which is this function where the model was loaded with trust_remote_code
    return type(model).generate(model, inputs, custom_generate=cached.spec, **arguments)  # type: ignore[attr-defined]


def _opened(model: PreTrainedModel) -> _Kept:
    name = str(model.config.name_or_path)
    folder = Path(name)
    if not folder.is_dir():
        folder = fetch(name, getattr(model.config, "_commit_hash", None))
    path = folder / EXPORTED
    if not path.is_file():
        raise ValueError(
            f"the model was loaded from {name!r}, which is no folder that selfspec export --to transformers "
            f"wrote ({EXPORTED} is missing); load the model from the folder that custom_generate names"
        )
    try:
        settings = read_json(path)
        names, nodes = str(settings["drafter"]).split("+"), settings["nodes"]
        if odd := [name for name in names if name != OWN and (Path(name).exists() or untrained(name) is None)]:
            raise ValueError(f"drafter names {odd[0]!r:.200}, which does not lie in {folder}")
    except (ValueError, TypeError, KeyError) as error:
        raise ValueError(f"{path} is not what was written ({error}); export the drafter again") from error
    flags = [(p, p.requires_grad) for p in model.parameters()]
    try:
        target, tokenizer = load_target(model)
        places = {part: str(folder / part) if part == OWN else part for part in names}
        # trust_remote_code led here, so that drafters of other packages are trusted too
        members = {part: find_drafter(place, target, tokenizer, trust=True) for part, place in places.items()}
        return _Kept(Spec(target, joined(target, members), tokenizer), nodes)
    finally:
        for parameter, flag in flags:
            parameter.requires_grad_(flag)
