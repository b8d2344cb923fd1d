"""selfspec export: a trained drafter in the form that another engine serves, checked before it is done."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase as Tokenizer

from selfspec.checkpoints.drafter_folder import load_drafter, read_meta, save_drafter
from selfspec.checkpoints.embedded import resolve
from selfspec.checkpoints.find import EXPORTED, OWN, drafter_folder
from selfspec.checkpoints.formats import block, eagle3, medusa, mtp
from selfspec.checkpoints.formats.imported import read as read_published
from selfspec.checkpoints.hub import fetch
from selfspec.checkpoints.loading import load_pair, members_of
from selfspec.checkpoints.target_parts import load_parts
from selfspec.checkpoints.weights_hash import PARTS
from selfspec.core.target import Target
from selfspec.drafters.base import Drafter, Sample, Trained
from selfspec.drafters.block import BlockDrafter
from selfspec.drafters.eagle3 import Eagle3
from selfspec.drafters.medusa import Medusa
from selfspec.drafters.mtp import Mtp
from selfspec.integrations.engines import FORMATS, commands, refuse, transformers_commands
from selfspec.training.states import behind_layers
from selfspec.utils.files import atomic

_TEXT = 96  # tokens of the text that a written file is checked on
# Relative error of logits up to which a written file computes what the drafter does. Measured on random weights: 1e-6
# in float32, 6e-3 where LoRA was folded into 16-bit weights, 2e-2 in bfloat16
_EXACT, _FOLDED, _ROUGH = 1e-4, 0.03, 0.1
_COPIED = (".json", ".model", ".txt", ".jinja", ".py")  # beside a target's weights
_OTHERS = (EXPORTED, "drafter.json", "training.json")  # but not these, which say what lay beside it
_GENERATE = '''"""Speculative decoding by selfspec with the drafter in this folder."""

from selfspec.integrations.hf_serve import generate as _generate


def generate(inputs=None, generation_config=None, *, model, **arguments):
    return _generate(model, inputs, generation_config=generation_config, **arguments)
'''


def export(
    name: str,
    to: str,
    out: str | Path,
    target: str | None = None,
    dtype: str = "float32",
    nodes: int | str | None = None,
    trust: bool = False,
) -> list[str]:
    """Write the drafter `name` to the folder `out` in the form `to`, one of `FORMATS`. Returns what to tell the user:
    what was checked, and the commands that serve it. dtype: in which it is checked; nodes: of the draft tree, where
    transformers runs the folder (None: 16); trust: whether it may be of another package.

    Files of other engines are read back and must give the drafter's own logits on real text, or nothing is left behind
    (the tests hold them against an independent reading of each format). Raises ValueError for a form that the drafter
    does not fit, with the reason, and for a folder that exists.
    """
    if to not in FORMATS:
        raise ValueError(f"--to {to!r} must be one of {', '.join(FORMATS)}")
    folder = Path(out)
    if not str(out) or folder.exists():
        raise ValueError(f"--out {str(out)!r} {'exists' if str(out) else 'is empty'}; give a new folder")
    if not folder.absolute().parent.is_dir():
        raise ValueError(f"--out {str(out)!r}: the folder {folder.absolute().parent} does not exist")
    if not os.access(folder.absolute().parent, os.W_OK):
        raise ValueError(
            f"--out {str(out)!r}: nothing can be written to {folder.absolute().parent}; name another folder"
        )
    if nodes is not None and (to != "transformers" or not (nodes == "auto" or (isinstance(nodes, int) and nodes > 0))):
        raise ValueError(f"--nodes {nodes}: a number above 0 or auto, with --to transformers; engines set their own")
    loaded, drafter, tokenizer = _pair(name, target, dtype, trust)
    if to == "transformers":
        with atomic(folder) as scratch:
            write_transformers(name, drafter, loaded, tokenizer, scratch, nodes)
        return [f"{folder}: {_size(folder):.1f} MB with the target", *transformers_commands(folder)]
    return write_engine_files(drafter, loaded, tokenizer, to, folder)


def _pair(name: str, target: str | None, dtype: str, trust: bool) -> tuple[Target, Drafter, Tokenizer | None]:
    """A drafter on its target, of which only parts are read where it was trained on parts."""
    folder = drafter_folder(name) if Path(name).is_dir() and "+" not in name else None
    if folder is not None and (folder / "drafter.json").is_file():
        theirs = read_meta(folder)["target"]
        if str(theirs["weights_hash"]).startswith(PARTS):
            loaded, tokenizer = load_parts(target or str(theirs["name"]), dtype, "cpu")
            return loaded, load_drafter(folder, loaded, tokenizer, trust), tokenizer
    return load_pair(name, target, dtype, None, trust=trust)[:3]


def write_engine_files(
    drafter: Drafter, loaded: Target, tokenizer: Tokenizer | None, to: str, folder: Path
) -> list[str]:
    """As `export`, of a drafter that is loaded, for another engine."""
    refuse(drafter, loaded, to)
    where = resolve(loaded.name)
    where = str(Path(where).absolute()) if Path(where).is_dir() else where
    lines: list[str] = []
    with atomic(folder) as scratch:
        if isinstance(drafter, Eagle3):
            eagle3.write(drafter, loaded, scratch, "speculators" if to == "speculators" else "plain", where)
        elif isinstance(drafter, BlockDrafter):
            block.write(drafter, loaded, scratch)
        elif isinstance(drafter, Mtp):
            source = _source(loaded)
            mtp.write(drafter, loaded, source, scratch)
            _copy_rest(source, scratch)
        elif isinstance(drafter, Medusa):
            parts = {"vllm": scratch / "vllm", "tgi": scratch / "tgi"} if to == "medusa" else {"vllm": scratch}
            medusa.write_vllm(drafter, loaded, parts["vllm"])
            if "tgi" in parts:
                medusa.write_tgi(drafter, loaded, parts["tgi"], where)
        for part in sorted({path.parent for path in scratch.rglob("config.json")}):
            lines.append(_checked(part, drafter, loaded, _text(loaded, tokenizer)))
    return [f"{folder}: {_size(folder):.1f} MB", *lines, *commands(drafter, to, folder, where)]


def _text(target: Target, tokenizer: Tokenizer | None) -> Tensor:
    """Real text for checks, int64 [n]: this file. Random tokens where there is no tokenizer, or an empty one."""
    most = min(_TEXT, target.max_positions or _TEXT)
    ids: list[int] = [] if tokenizer is None else tokenizer(Path(__file__).read_text())["input_ids"]
    if len(ids) < most:
        return torch.randint(target.vocab_size, (most,), generator=torch.Generator().manual_seed(0))
    return torch.tensor(ids[:most])


@torch.no_grad()
def _checked(folder: Path, drafter: Drafter, target: Target, tokens: Tensor) -> str:
    """Read written files back. Raises ValueError where they draft other logits along a text."""
    again = mtp.read(target, folder) if isinstance(drafter, Mtp) else read_published(folder, target).eval()
    assert isinstance(drafter, Trained)
    assert isinstance(again, Trained)
    reads, ids = tuple(sorted({*drafter.reads, *again.reads, target.n_layers - 1})), tokens[None].to(target.device)
    if target.partial:  # what a drafter computes can be held against its file on any states
        shape = *ids.shape, target.hidden_size
        out = behind_layers(target, ids, {i: torch.randn(shape).to(target.lm_head.weight) for i in reads})
    else:
        out = target.text(ids, False, reads=reads)
    sample = Sample(tokens, 2, out.hidden[0], {layer: part[0] for layer, part in out.features.items()}, 0.0, None)
    depths = min(drafter.depth, again.depth)
    at = torch.arange(2, len(tokens) - depths - 2, device=target.device)
    ours, theirs = (one.scores(sample, at)[:depths].float() for one in (drafter, again))
    drafted = ours.isfinite()  # of a draft vocabulary
    error = float((ours - theirs)[drafted].norm() / ours[drafted].norm())
    folded = isinstance(drafter, (Medusa, Mtp)) and target.saved_dtype.itemsize < 4
    if not error <= (_ROUGH if target.dtype.itemsize < 4 else _FOLDED if folded else _EXACT):
        raise ValueError(
            f"{folder}: logits differ from the drafter's by {error:.2g} of their norm; the file does not say what the "
            "drafter computes"
        )
    return f"checked: read back, logits of {depths} depths within {error:.1e} of the drafter's"


def _size(folder: Path) -> float:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file()) / 1e6


def write_transformers(
    name: str, drafter: Drafter, target: Target, tokenizer: Tokenizer | None, folder: Path, nodes: int | str | None
) -> None:
    """A folder that transformers loads as the plain target, with the drafter and what its generate needs beside.

    Raises ValueError for more than one trained drafter, and for a target that was not loaded from safetensors files.
    """
    members = members_of(name, drafter)
    trained = [member for member in members.values() if isinstance(member, Trained)]
    if len(trained) > 1:
        raise ValueError(f"{name!r} joins {len(trained)} trained drafters; a folder holds one, beside n-gram drafters")
    source = _source(target)
    folder.mkdir()
    _copy_rest(source, folder)
    for path in source.glob("*.safetensors"):
        _link(path.resolve(), folder / path.name)
    names = []
    for part, member in members.items():
        if member in trained:
            save_drafter(member, folder / OWN, target, target.name, tokenizer, "")
        names.append(OWN if member in trained else part)
    (folder / EXPORTED).write_text(json.dumps({"drafter": "+".join(names), "nodes": nodes}) + "\n")
    (folder / "custom_generate").mkdir()
    (folder / "custom_generate/generate.py").write_text(_GENERATE)
    (folder / "custom_generate/requirements.txt").write_text("selfspec\n")


def _copy_rest(source: Path, folder: Path) -> None:
    """What lies beside a target's weights, such as its tokenizer, and is not in the folder yet."""
    for path in source.iterdir():
        wanted = path.is_file() and path.suffix in _COPIED and path.name not in _OTHERS
        if wanted and not (folder / path.name).exists():
            shutil.copyfile(path.resolve(), folder / path.name)


def _source(target: Target) -> Path:
    """The target's own folder. Raises ValueError where it has no safetensors files."""
    source = Path(resolve(target.name))
    if not source.is_dir():
        source = fetch(target.name, getattr(target.model.config, "_commit_hash", None))
    if not (source / "config.json").is_file() or not any(source.glob("*.safetensors")):
        raise ValueError(
            f"target {target.name!r} has no config.json and safetensors files in {source}; save it there first: "
            "model.save_pretrained(...)"
        )
    return source


def _link(path: Path, to: Path) -> None:
    """The same weights under another name, or a copy where the file system has no such links."""
    try:
        os.link(path, to)
    except OSError:
        shutil.copyfile(path, to)
