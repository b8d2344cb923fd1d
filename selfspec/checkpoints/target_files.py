"""What is checked of a target's files before transformers reads them, since they may come from anyone."""

from __future__ import annotations

import re
from collections.abc import Iterable
from functools import cached_property
from itertools import groupby
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from torch import Tensor
from transformers import PreTrainedConfig
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME

from selfspec.checkpoints.embedded import resolve
from selfspec.checkpoints.find import is_path
from selfspec.checkpoints.formats.files import weight_map
from selfspec.checkpoints.hub import fetch
from selfspec.utils.files import Figures, inside, read_json

_BESIDE = ["*.json", "*.txt", "*.model", "*.jinja"]  # a checkpoint's weights: config, tokenizer, index
_BESIDE_TEXT = re.compile(r"vis|audio|mtp")  # in names of modules beside a text model
_LAYERS = 1024  # of a target, more than any model has


def check_config(path: str, fetching: Figures, attention: bool) -> None:
    """Raises ValueError for a config that would take all memory before its weights are looked at, or that names code
    of a repository. attention: whether the caller says what computes it."""
    whole = read_json(Path(path) / "config.json") if Path(path).is_dir() else {}
    if (sampling := Path(path) / "generation_config.json").is_file():
        read_json(sampling)  # transformers would leave out a broken one
    whole = whole or PreTrainedConfig.get_config_dict(path, **fetching)[0]
    for config in (whole, *(part for part in whole.values() if isinstance(part, dict))):
        for name, value in config.items():
            if re.fullmatch(r"(num|n)_(hidden_)?layers?", name) and isinstance(value, int) and value > _LAYERS:
                raise ValueError(f"target {path!r}: config.json: {name}={value}; models of up to {_LAYERS} are read")
            if "attn_implementation" in name and "/" in str(value) and not (attention or fetching["trust_remote_code"]):
                raise ValueError(
                    f"target {path!r}: config.json: {name}={value!r:.200} is code of a repository; give "
                    "attn_implementation='sdpa', or trust_remote_code=True"
                )


def check_shards(index: Path) -> None:
    """Raises ValueError or FileNotFoundError for a damaged index, and for a file that it names and that is missing."""
    for name in sorted(set(weight_map(index).values())):
        if not (path := inside(index.parent, name, index)).is_file():
            raise FileNotFoundError(f"{path} is missing, which {index.name} names; copy it again")


def opened(path: Path) -> Any:
    try:
        return safe_open(path, "pt")
    except SafetensorError as error:
        raise ValueError(f"{path} is no whole safetensors file ({error})") from error


class Shards:
    """A checkpoint's safetensors files by the tensors they hold; of a hub id, each file is fetched when it is read."""

    def __init__(self, name: str, revision: str | None = None) -> None:
        """Raises FileNotFoundError where there are none."""
        self.name, self.revision, place = name, revision, Path(resolve(name))
        self.hub = None if place.is_dir() or is_path(name) else name
        if self.hub is not None:
            place = fetch(self.hub, revision, _BESIDE)
        self.folder, index = place, place / SAFE_WEIGHTS_INDEX_NAME
        single = self._path(SAFE_WEIGHTS_NAME)
        if single.is_file():  # where there are both, transformers reads this one
            with opened(single) as file:
                self.files = dict.fromkeys(file.keys(), SAFE_WEIGHTS_NAME)
        elif index.is_file():
            self.files = weight_map(index)
        else:
            raise FileNotFoundError(
                f"{name!r} has no safetensors files, from which parts are read: {place} has neither "
                f"{SAFE_WEIGHTS_NAME} nor {SAFE_WEIGHTS_INDEX_NAME}; load the target by a folder that has them"
            )

    def _path(self, file: str) -> Path:
        if self.hub is not None:
            fetch(self.hub, self.revision, file)
        return inside(self.folder, file, self.folder / SAFE_WEIGHTS_INDEX_NAME)

    def find(self, parameter: str) -> str | None:
        """A parameter's name in the files, which may have another prefix there: of several the one of the text model,
        which has most layers; others are of modules beside them, such as mtp."""
        if parameter in self.files:
            return parameter
        end, short = parameter.removeprefix("model."), ".".join(parameter.split(".")[-2:])
        found, shortly = ([name for name in self.files if f".{name}".endswith(f".{tail}")] for tail in (end, short))
        if len(found) > 1:
            found.sort(key=lambda name: self._layers.get(name.removesuffix(end), 0))
        return found[-1] if found else shortly[0] if len(shortly) == 1 else None

    @cached_property
    def _layers(self) -> dict[str, int]:
        """How many layers stand behind each prefix, in `layers`, `h` or another list of text models' names."""
        layers: dict[str, set[str]] = {}
        for name in self.files:
            match = re.match(r"((?:.+\.)?)(?:layers|h|blocks)\.(\d+)\.", name)
            if match and not _BESIDE_TEXT.search(match[1]):
                layers.setdefault(match[1], set()).add(match[2])
        return {prefix: len(numbers) for prefix, numbers in layers.items()}

    def tensors(self, names: Iterable[str]) -> dict[str, Tensor]:
        """Raises FileNotFoundError for a missing file, ValueError for one that is not whole or lacks a tensor."""
        found: dict[str, Tensor] = {}
        for file, part in groupby(sorted(names, key=self.files.__getitem__), self.files.__getitem__):
            path = self._path(file)
            if not path.is_file():
                raise FileNotFoundError(f"{path} is missing, which {SAFE_WEIGHTS_INDEX_NAME} names; copy it again")
            with opened(path) as opened_file:
                for name in part:
                    try:
                        found[name] = opened_file.get_tensor(name)
                    except SafetensorError as error:
                        raise ValueError(
                            f"{path} lacks {name}, which {SAFE_WEIGHTS_INDEX_NAME} looks for there"
                        ) from error
        return found

    def read(self, name: str) -> Tensor:
        return self.tensors([name])[name]
