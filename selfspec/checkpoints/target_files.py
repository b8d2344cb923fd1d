"""What is checked of a target's files before transformers reads them, since they may come from anyone."""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from transformers import PreTrainedConfig

from selfspec.checkpoints.formats.files import weight_map
from selfspec.utils.errors import visible
from selfspec.utils.files import Figures, inside, read_json

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


@contextmanager
def readable_log() -> Iterator[None]:
    """What transformers logs in the meantime is text: names of tensors come from files."""

    def readable(record: logging.LogRecord) -> bool:
        if "LOAD REPORT" in record.getMessage():  # of weights, which the caller names
            return False
        record.msg, record.args = visible(re.sub(r"\x1b\[[\d;]*m", "", record.getMessage())), ()
        return True

    handlers = list(logging.getLogger("transformers").handlers)
    for handler in handlers:
        handler.addFilter(readable)
    try:
        yield
    finally:
        for handler in handlers:
            handler.removeFilter(readable)


def check_shards(index: Path) -> None:
    """Raises ValueError or FileNotFoundError for a damaged index, and for a file that it names and that is missing."""
    for name in sorted(set(weight_map(index).values())):
        if not (path := inside(index.parent, name, index)).is_file():
            raise FileNotFoundError(f"{path} is missing, which {index.name} names; copy it again")
