"""Targets: loaded from a folder, a hub id or a GGUF file, cast, placed, with their tokenizers."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedConfig, PreTrainedModel
from transformers import PreTrainedTokenizerBase as Tokenizer
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME, WEIGHTS_INDEX_NAME, logging

from selfspec.checkpoints.cast import Stock
from selfspec.checkpoints.embedded import resolve
from selfspec.checkpoints.find import check_target_name
from selfspec.checkpoints.formats.files import few
from selfspec.checkpoints.hub import fetch
from selfspec.checkpoints.named import elsewhere
from selfspec.checkpoints.target_files import check_config, check_shards
from selfspec.checkpoints.weights_hash import parts_of, weights_hash
from selfspec.core.memory import no_room
from selfspec.core.probe import served
from selfspec.core.quantized import has_int8, has_kernel, quantize
from selfspec.core.support import refuse_any
from selfspec.core.target import Target
from selfspec.engine.choose import check_engine
from selfspec.engine.kernels.fastest import in_huge_pages
from selfspec.engine.kernels.native import has_tiles
from selfspec.utils.errors import did_you_mean, one_line
from selfspec.utils.files import Figures
from selfspec.utils.machine import check_device, default_device, dtype_name

# Of from_pretrained: what says where files are and whether code in them may run, so of configs and tokenizers too
_FETCHING = (
    *("trust_remote_code", "subfolder", "token", "cache_dir", "local_files_only", "force_download", "proxies"),
    "code_revision",
)
_TOKENIZERS = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "spiece.model", "vocab.json", "vocab.txt")
_TREES = ("sdpa", "eager")  # attention that takes tree masks
_OTHERS = ("flash_attention_2", "flash_attention_3", "flash_attention_4", "flex_attention")


def load_target(
    source: str | Path | PreTrainedModel,
    dtype: str | torch.dtype = "auto",
    device: str | None = None,
    revision: str | None = None,
    engine: str = "eager",
    divide: Callable[[PreTrainedModel], None] | None = None,
    **loading: Any,
) -> tuple[Target, Tokenizer | None]:
    """A target and its tokenizer (None where it has none) by embedded name, folder, hub id or GGUF file, or a model
    already loaded (PEFT adapters on it are then part of the target; it is frozen, set to eval and, where asked, cast
    and moved in place). engine: eager, or compiled (see `selfspec.engine`). divide: puts the model on its device,
    instead of `device`, in parts (see `selfspec.training.shard`). dtype: int8 quantizes linear maps (see
    `selfspec.core.quantized`). `loading` goes to transformers' from_pretrained: device_map,
    quantization_config, attn_implementation and the like.

    A probe runs a small tree against plain passes. Raises ValueError for models that can not be served;
    FileNotFoundError for a folder without a model.
    """
    kind = dtype_name(str(dtype).removeprefix("torch."))
    int8, wanted = kind == "int8", None if kind == "auto" else getattr(torch, "bfloat16" if kind == "int8" else kind)
    named = isinstance(source, (str, Path))
    device = None if device in (None, "auto") else str(device)
    if int8 and (divide is not None or loading or torch.device(device or "cpu").type != "cpu"):
        raise ValueError("dtype='int8' serves a whole target on the CPU; leave out device and what goes beside it")
    if wanted is not None and loading.get("quantization_config") is not None:  # what is quantized is cast before
        loading, wanted = {**loading, "dtype": wanted}, None
    check_engine(engine)
    if device is not None:
        check_device(device)
    elif named and divide is None and not int8 and "device_map" not in loading:
        device = default_device()
    fetching = {name: value for name, value in loading.items() if name in _FETCHING}
    fetching.setdefault("trust_remote_code", False)  # None would ask on the terminal
    model, name, path = _model(source, revision, fetching, loading)
    if wanted not in (None, torch.bfloat16) and has_int8(model):
        raise ValueError(f"dtype={dtype}: the model multiplies in 8 bits, which takes bfloat16; leave dtype out")
    stock = None if wanted is None else Stock(model, wanted)
    stock = stock if stock is not None and stock.differs else None
    changed = stock is not None or divide is not None
    parts = parts_of(model) if changed or int8 else None  # of the weights as saved
    saved_hash = weights_hash(model, torch.bfloat16) if changed else None  # float16 would round what it can not hold
    saved_dtype = model.get_output_embeddings().weight.dtype if stock is not None else None
    with no_room(f"target {name!r} on {device}"):
        if stock is not None:
            stock.cast()
        if divide is not None:
            divide(model)
        elif device is not None:
            model.to(device)  # type: ignore[arg-type]
    if int8:
        quantize(model)
        if named and torch.cuda.is_available():
            print("int8: the CPU computes, though a GPU is here", file=sys.stderr)
        if not has_kernel():
            print("int8: no kernel here (AVX2 or AVX-512 VNNI and a C++ compiler); torch multiplies", file=sys.stderr)
    if engine != "eager" and named and not int8:
        _move(model)
    with no_room(f"a pass of target {name!r}"):
        target = served(model, stock=named and divide is None)
    target.saved_hash, target.saved_dtype = saved_hash, saved_dtype or target.saved_dtype
    target.saved_parts = parts
    target.name = name or target.name  # as it was typed: what is saved with a drafter finds it again
    target.use_engine(engine)
    return target, _tokenizer(path, revision, fetching) if path else None


def _model(source: Any, revision: str | None, fetching: Figures, loading: Figures) -> tuple[PreTrainedModel, str, str]:
    """The model, its name as it was typed, and where it lies."""
    if isinstance(source, (str, Path)):
        name, path = str(source), resolve(str(source))
        if Path(path).is_dir() and (inner := loading.pop("subfolder", None) or fetching.pop("subfolder", None)):
            fetching.pop("subfolder", None)
            name = path = str(Path(path) / str(inner))
        model = _read(name, path, revision, fetching, loading)
    else:
        model = _given(source, loading)
        name = path = str(model.config.name_or_path)
    if any(parameter.is_meta for parameter in model.parameters()):
        raise ValueError("target has weights on disk or on the meta device; trees need all of them in memory")
    refuse_any(model)
    return model, name, path


def _read(name: str, path: str, revision: str | None, fetching: Figures, loading: Figures) -> PreTrainedModel:
    """The model in a folder or of a hub id. name: as it was typed; fetching, loading: arguments of from_pretrained."""
    check_target_name(name, path)
    if revision is not None and Path(path).exists():
        raise ValueError(f"revision={revision!r} is of a hub id; target {name!r} is here, so leave it out")
    if not Path(path).exists():  # where the hub gives none, transformers would ask it for a minute
        asking = {key: fetching[key] for key in ("token", "cache_dir", "local_files_only") if key in fetching}
        try:
            fetch(path, revision, "*config.json", **asking)
        except FileNotFoundError as error:
            raise FileNotFoundError(f"{error}{elsewhere(path)}") from None
    try:
        check_config(path, {"revision": revision, **fetching}, "attn_implementation" in loading)
        config = AutoConfig.from_pretrained(path, revision=revision, **fetching)
    except (OSError, ImportError):
        raise
    except ValueError as error:  # of transformers, which names no place
        if name in str(error):
            raise
        raise ValueError(f"target {name!r}: {one_line(error):.300}") from error
    except Exception as error:  # a value of the wrong type, or none that a model can have
        raise ValueError(f"target {name!r}: its config.json is not read: {one_line(error):.300}") from error
    for index in (SAFE_WEIGHTS_INDEX_NAME, WEIGHTS_INDEX_NAME):
        if (Path(path) / index).is_file():
            check_shards(Path(path) / index)
    if config.is_encoder_decoder:
        raise ValueError(f"target {name!r} is an encoder-decoder; selfspec serves decoder-only models")
    loading, level = _attention(config, loading), logging.get_verbosity()
    logging.set_verbosity_error()  # names of tensors, which come from files; what matters of them is said below
    try:
        settings = {"dtype": "auto", "revision": revision, "config": config, **fetching, **loading}
        with no_room(f"target {name!r}"):
            loaded: Any = AutoModelForCausalLM.from_pretrained(path, **settings, output_loading_info=True)
    except (OSError, ImportError, ValueError, MemoryError):
        raise
    except Exception as error:  # damaged weights, or those of another model
        if loading and "unexpected keyword" in str(error):  # of the model's constructor, which names itself alone
            raise ValueError(f"from_pretrained does not take {', '.join(loading)} ({error})") from error
        why = f"its config.json and weights make no model: {one_line(error):.300}"
        raise ValueError(f"target {name!r}: {why}") from error
    finally:
        logging.set_verbosity(level)
    model, report = loaded
    if unused := sorted(report["unexpected_keys"]):
        print(
            f"target {name!r}: its files hold weights that {type(model).__name__} has no place for: {few(unused)}",
            file=sys.stderr,
        )
    if drawn := [*report["missing_keys"], *(str(key[0]) for key in report["mismatched_keys"])]:
        raise ValueError(
            f"target {name!r}: its files hold no weights for {few(drawn)} of {type(model).__name__}, which would be "
            "random numbers; save the whole model"
        )
    return model


def _given(source: Any, loading: Figures) -> PreTrainedModel:
    """A model that is loaded already, adapters inside it."""
    if loading:
        raise ValueError(f"{', '.join(loading)} can not be applied to a target that is loaded already")
    adapter = getattr(source, "active_peft_config", None)
    if adapter is not None and adapter.is_prompt_learning:
        raise ValueError(
            f"target has a {adapter.peft_type.value} adapter, which lives outside the model's layers; only "
            "adapters inside them (such as LoRA) can be part of a target"
        )
    model = getattr(source, "get_base_model", lambda: source)()  # a PEFT model's own
    if not isinstance(model, PreTrainedModel):
        raise ValueError(f"target is of type {type(model).__name__}; give a name, a folder or a transformers model")
    if (asked := model.config._attn_implementation) not in _TREES:
        _say_instead(asked)
        model.set_attn_implementation("sdpa")
    return model


def _attention(config: PreTrainedConfig, loading: Figures) -> Figures:
    """Arguments of from_pretrained, with attention that takes tree masks where the caller or the config names other."""
    asked = loading.get("attn_implementation") or config._attn_implementation
    if asked in (None, *_TREES) or not isinstance(asked, str):
        return loading
    if asked.partition("|")[2] not in _OTHERS and asked not in _OTHERS and "/" not in asked:
        raise ValueError(f"attn_implementation={asked!r}{did_you_mean(asked, (*_TREES, *_OTHERS))}: give sdpa or eager")
    _say_instead(asked)
    return {**loading, "attn_implementation": "sdpa"}


def _say_instead(attention: str) -> None:
    print(f"attention by {attention!r} takes no tree masks; sdpa computes it", file=sys.stderr)


def _tokenizer(path: str, revision: str | None, passed: Figures) -> Tokenizer | None:
    """The tokenizer of a target's folder or hub id; None where there is none. Raises ValueError for one that is there
    and can not be read."""
    try:
        tokenizer = AutoTokenizer.from_pretrained(path, revision=revision, **passed)
        # Else what transformers makes up for a folder without one
        return tokenizer if len(tokenizer) > len(tokenizer.all_special_ids) else None
    except Exception as error:  # of readers in several languages
        there = [name for name in _TOKENIZERS if (Path(path) / name).is_file()]
        if not there and (isinstance(error, OSError) or Path(path).is_dir()):
            return None
        of = f"{path} ({', '.join(there)})"
        raise ValueError(f"the tokenizer in {of} can not be read: {one_line(error)}") from error


def _move(model: PreTrainedModel) -> None:
    """Move weights on the CPU into huge pages: those that kernels read in place, and those that a mapped file has
    elsewhere than at the start of a cache line. What each brings is in notebooks/LOG.md. Weights that are quantized
    tensors stay."""
    for parameter in model.parameters():
        if type(parameter) is not nn.Parameter or parameter.device.type != "cpu" or not parameter.numel():
            continue
        if parameter.data_ptr() % 64 or (parameter.dtype == torch.bfloat16 and has_tiles()):
            parameter.data = in_huge_pages(parameter.data)


def load_tokenizer(name: str) -> Tokenizer:
    """A tokenizer by an embedded target's name, a folder or a hub id. Raises ValueError where there is none."""
    if (tokenizer := _tokenizer(resolve(name), None, {"trust_remote_code": False})) is None:
        raise ValueError(f"no tokenizer at {name!r}; give a folder or a hub id that has one")
    return tokenizer
