"""GGUF files as targets: dequantized once into the cache folder, where transformers reads a plain folder."""

from __future__ import annotations

import hashlib
import importlib.util
import io
import shutil
import sys
from contextlib import nullcontext, redirect_stderr
from importlib.metadata import version
from pathlib import Path
from typing import Any

from selfspec.utils.files import atomic, cache_folder

_FORM = 4  # of what is kept: before, texts of Llama 3 began without a BOS token
# Llama 3's scaling of positions, from 3.1 on, beside its factor
_LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
_SCALING = "rope.scaling.type", "rope.scaling.factor", "rope.scale_linear"
_BESIDE = ("rope_freqs", "rope_factors")  # tables of positions, which are no weights
_ENDS = ("eos_token_id", "eot_token_id", "eom_token_id")  # of a text, a turn, a message
# Byte-level tokenizers by the names of llama.cpp. Those that split text as GPT-2's do, which is what transformers takes
# for names that it does not know; and those that begin with a BOS token unless the file says otherwise, and take words
# of their vocabulary whole, which it does not do
_AS_GPT2 = {"default", "gpt-2", "phi-2", "mpt", "olmo", "jais", "trillion", "granite-docling", "gigachat", "mellum"}
_AS_GPT2 |= {"smollm", "starcoder", "refact", "command-r", "codeshell", "exaone", "exaone4", "minerva-7b"}
_WHOLE_WORDS = {"llama3", "llama-v3", "llama-bpe", "falcon3", "falcon-h1", "pixtral", "midm-2.0", "lfm2", "tekken"}
_OTHER_SCALE = ((46, "gemma2"), (62, "gemma3"))  # layers of the models of 27B, whose attention is scaled otherwise
_GROWTH = 8  # bytes on disk for one of a file's at most: four bits become 16, and a scratch copy may lie beside


class _Unread(ValueError):
    """Of a file that is whole, and holds what transformers would leave out."""


def dequantized(file: Path, folder: Path | None = None, quiet: bool = False) -> Path:
    """The folder of a GGUF file's model, made by the first call: `folder`, or one in the cache that the file's path,
    size and time name. Weights are kept in bfloat16, those of files in float32 or float16 in float32. quiet: without
    transformers' progress bars.

    Raises FileNotFoundError where there is no such file; ValueError without the package that reads it, without room,
    and for a file that is damaged or of a form that transformers does not know.
    """
    if folder is None:
        if not file.is_file():
            raise FileNotFoundError(f"target {str(file)!r} is not a file")
        state = file.stat()
        key = f"{_FORM} {version('transformers')} {file.resolve()} {state.st_size} {state.st_mtime_ns}"
        key = hashlib.sha256(key.encode()).hexdigest()[:16]
        folder = cache_folder() / "targets" / f"{file.stem}-{key}"
    if (folder / "config.json").is_file():
        return folder
    if importlib.util.find_spec("gguf") is None:
        raise ValueError(f"target {str(file)!r} is read by the package gguf, which is missing: pip install gguf")
    folder.parent.mkdir(parents=True, exist_ok=True)
    if (free := shutil.disk_usage(folder.parent).free) < (room := _GROWTH * file.stat().st_size):
        raise ValueError(
            f"{free / 2**20:.0f} MB are free in {folder.parent}, {file.name} needs {room / 2**20:.0f}; free some, or "
            "set SELFSPEC_CACHE to a folder with room"
        )
    with file.open("rb") as head:
        if head.read(4) != b"GGUF":
            raise ValueError(f"target {str(file)!r} is no GGUF file, or was cut off; copy it again")
    print(f"{file.name} is dequantized once, seconds to minutes, into {folder}", file=sys.stderr)
    with redirect_stderr(io.StringIO()) if quiet else nullcontext():  # errors are raised
        _convert(file, folder)
    return folder


def _convert(file: Path, folder: Path) -> None:
    import torch
    import transformers
    from gguf import GGUFReader

    target, whole = f"target {str(file)!r}", dict[str, Any]()
    if hasattr(transformers, "GgufConfig"):  # from 5.17 on; before, every file was dequantized
        whole = {"quantization_config": transformers.GgufConfig(dequantize=True, gguf_file=file.name)}
    try:
        reader = GGUFReader(file)
        widest = {tensor.tensor_type.name for tensor in reader.tensors if len(tensor.shape) > 1}
        dtype = torch.float32 if widest <= {"F32", "F16"} else torch.bfloat16
        fields = {name: field.contents() for name, field in reader.fields.items()}
        factors = {t.name: t.data for t in reader.tensors if t.name.startswith(_BESIDE) and (t.data != 1).any()}
        scaled = {name: how for name, how in fields.items() if name.endswith(_SCALING) and name[:7] != "gpt-oss"}
        if "none" not in scaled.values():
            factors |= {name: how for name, how in scaled.items() if how not in (0, 1, "linear")}
        why = f"{target} scales positions by {min(factors, default='')}, which is not read; take the model's folder"
        if len(factors) > 1 or any(isinstance(how, str) for how in factors.values()):
            raise _Unread(why)
        loaded: Any = transformers.AutoModelForCausalLM.from_pretrained(
            file.parent, gguf_file=file.name, dtype=dtype, output_loading_info=True, **whole
        )
        model, report = loaded
        if factors and not _scale_positions(model, *factors.values()):
            raise _Unread(why)
        if drawn := sorted(report["missing_keys"]):
            why = f"{target} holds no weights for {', '.join(drawn[:3])}"
            raise _Unread(f"{why}; merge the parts of a split file: llama-gguf-split --merge")
        numbers = sum(int(t.n_elements) for t in reader.tensors if not t.name.startswith(_BESIDE))
        kept = sum({part.data_ptr(): part.numel() for part in model.state_dict().values()}.values())
        tied = model.get_input_embeddings().weight.numel()  # which a file may hold twice
        more = numbers - kept  # below 0: a model may have buffers that no file holds
        odd = [] if more <= 0 or more == tied else [f"tensors, of which {more} numbers are left over"]
        if odd := odd + _other_settings(fields, model):
            raise _Unread(f"{target}: transformers does not read its {odd[0]}; take the model's folder")
        ends = {fields[f"tokenizer.ggml.{name}"] for name in _ENDS if f"tokenizer.ggml.{name}" in fields}
        if len(ends) > 1:
            model.generation_config.eos_token_id = sorted(ends)
        tokenizer: Any = transformers.AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)
        if fields.get("tokenizer.ggml.pre") in _WHOLE_WORDS:
            tokenizer.backend_tokenizer.model.ignore_merges = True
            tokenizer.add_bos_token = bool(fields.get("tokenizer.ggml.add_bos_token", True))
        if not _splits(fields):
            print(
                f"{file.name}: transformers does not know tokenizers of the form {fields.get('tokenizer.ggml.pre')!r} "
                "and splits text as GPT-2's do; prompts may have other tokens than the model knows; prefer its folder",
                file=sys.stderr,
            )
    except _Unread:
        raise
    except Exception as error:  # of two libraries, for damaged files of many kinds
        why = f"{type(error).__name__}: {error!s:.300}"
        raise ValueError(f"{target} is damaged, cut off or in a form that transformers lacks: {why}") from error
    model.config.__dict__.pop("quantization_config", None)  # it is a plain model now, and saved as one
    model.hf_quantizer = None
    with atomic(folder) as scratch:
        model.save_pretrained(scratch)
        tokenizer.save_pretrained(scratch)


def _splits(fields: dict[str, Any]) -> bool:
    """Whether transformers splits text as a file's tokenizer does."""
    try:
        from transformers.integrations.gguf.gguf_tokenizer_mapping import GGUF_PRE_TOKENIZER_SPLITS as known
    except ImportError:  # before 5.17, which goes by the architecture
        return True
    of_bytes = fields.get("tokenizer.ggml.model") == "gpt2"
    return not of_bytes or fields.get("tokenizer.ggml.pre") in {*known, *_AS_GPT2}


def _scale_positions(model: Any, factors: Any) -> bool:
    """Write into the config that rotary frequencies are divided by `factors`, one for each or one for all, which
    transformers does not read. False where it has no such form."""
    import torch

    every = getattr(model.config, "rope_parameters", None) or {}
    plain = every.get("full_attention", every)  # Gemma's sliding layers have frequencies of their own
    name = "inv_freq" if plain is every else "full_attention_inv_freq"
    rotary = [part for part in model.modules() if name in part._buffers]
    if len(rotary) != 1 or plain.get("rope_type") != "default":
        return False
    divisors = torch.tensor(factors)
    for form in ({"rope_type": "linear"}, {"rope_type": "llama3", **_LLAMA3}):
        scaled = {**plain, **form, "factor": float(divisors.max())}
        model.config.rope_parameters = scaled if plain is every else {**every, "full_attention": scaled}
        before, after = (getattr(part, name) for part in (rotary[0], type(rotary[0])(model.config)))
        fits = not divisors.ndim or divisors.shape == after.shape
        if fits and torch.allclose(after, before / divisors, 1e-4, 0):
            return True
    model.config.rope_parameters = every
    return False


def _other_settings(fields: dict[str, Any], model: Any) -> list[str]:
    """What a file says, and the model that was made of it has otherwise."""
    arch = fields.get("general.architecture")
    said = {name: fields.get(f"{arch}.{name}") for name in ("rope.freq_base", "rope.dimension_count")}
    said["attention.sliding_window"] = fields.get(f"{arch}.attention.sliding_window")
    turned = [buffer for name, buffer in model.named_buffers() if name.endswith("inv_freq")]
    has: dict[str, list[Any]] = {
        "rope.freq_base": _values(model.config.to_dict(), "rope_theta"),
        "rope.dimension_count": [2 * len(buffer) for buffer in turned],
        "attention.sliding_window": _values(model.config.to_dict(), "sliding_window"),
    }
    odd = [
        f"{arch}.{name}={value}"
        for name, value in said.items()
        if value and (turned or "rope" not in name) and not any(_near(value, one) for one in has[name])
    ]
    if (fields.get(f"{arch}.block_count"), arch) in _OTHER_SCALE:
        odd.append("scale of attention")
    return odd


def _values(config: Any, name: str) -> list[Any]:
    """All values of this name in a config, however deep."""
    if not isinstance(config, dict):
        return []
    return [config.get(name), *(value for part in config.values() for value in _values(part, name))]


def _near(one: float, other: float | None) -> bool:
    return other is not None and abs(one - other) <= 1e-5 * abs(one)
