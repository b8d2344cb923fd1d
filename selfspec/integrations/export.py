"""selfspec export: a trained drafter in the form that another engine serves, checked before it is done."""

from __future__ import annotations

import json
import os
import shlex
import shutil
from pathlib import Path

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase as Tokenizer

from selfspec.checkpoints.drafter_folder import save_drafter
from selfspec.checkpoints.embedded import resolve
from selfspec.checkpoints.formats import block, eagle3, medusa, mtp, reference
from selfspec.checkpoints.formats.files import hold, read_config, read_tensors
from selfspec.checkpoints.hub import fetch
from selfspec.checkpoints.loading import EXPORTED, load_pair, members_of
from selfspec.core.target import Target
from selfspec.drafters.base import Drafter, Trained
from selfspec.drafters.block import BlockDrafter
from selfspec.drafters.eagle3 import Eagle3
from selfspec.drafters.medusa import Medusa
from selfspec.drafters.mtp import Mtp
from selfspec.integrations.hf_serve import OWN
from selfspec.utils.files import atomic

FORMATS = ("vllm", "sglang", "speculators", "medusa", "transformers")
_WHY = {  # of kinds that no form has a place for
    "feature": "its layer mixes the next token's embedding into the residual, which no engine's draft layer does",
    "sequential": "no engine reads heads that see the tokens drafted before them",
    "early_exit": "it runs the target's own layers, which engines do not give to drafters",
    "mask": "its mask slots stand in the target's pass, which engines do not offer",
    "hybrid": "engines take one drafter, so export one of its members alone",
    "prompt_lookup": "it has no weights; vLLM and SGLang have n-gram drafting of their own (method ngram)",
    "lookahead": "it has no weights; vLLM and SGLang have n-gram drafting of their own (method ngram)",
}
_COPIED = (".json", ".model", ".txt", ".jinja", ".py")  # beside a target's weights
_OTHERS = (EXPORTED, "drafter.json", "training.json")  # but not these, which say what lay beside it
_GENERATE = '''"""Speculative decoding by selfspec with the drafter in this folder."""

from selfspec.integrations.hf_serve import generate as _generate


def generate(inputs=None, *, model, **arguments):
    return _generate(model, inputs, **arguments)
'''
_TEXT = 96  # tokens of the text that a written file is checked on
# Relative error of logits up to which a written file computes what the drafter does. Measured on random weights: 1e-6
# in float32, 6e-3 where LoRA was folded into 16-bit weights, 2e-2 in bfloat16
_EXACT, _FOLDED, _ROUGH = 1e-4, 0.03, 0.1


def export(
    name: str,
    to: str,
    out: str | Path,
    target: str | None = None,
    dtype: str = "float32",
    nodes: int | str | None = None,
) -> list[str]:
    """Write the drafter `name` to the folder `out` in the form `to`, one of `FORMATS`. Returns what to tell the user:
    what was checked, and the commands that serve it. dtype: in which it is checked; nodes: of the draft tree, where
    transformers runs the folder (None: 16).

    Files of other engines are read back by an independent reading of the format (`formats.reference`) and must give the
    drafter's own logits on real text, or nothing is left behind. Raises ValueError for a form that the drafter does not
    fit, with the reason, and for a folder that exists.
    """
    if to not in FORMATS:
        raise ValueError(f"--to {to!r} must be one of {', '.join(FORMATS)}")
    folder = Path(out)
    if not str(out) or folder.exists():
        raise ValueError(f"--out {str(out)!r} {'exists' if str(out) else 'is empty'}; give a new folder")
    if not folder.absolute().parent.is_dir():
        raise ValueError(f"--out {str(out)!r}: the folder {folder.absolute().parent} does not exist")
    if nodes is not None and (to != "transformers" or not (nodes == "auto" or (isinstance(nodes, int) and nodes > 0))):
        raise ValueError(f"--nodes {nodes}: a number above 0 or auto, with --to transformers; engines set their own")
    loaded, drafter, tokenizer, _ = load_pair(name, target, dtype, None)
    if to == "transformers":
        with atomic(folder) as scratch:
            write_transformers(name, drafter, loaded, tokenizer, scratch, nodes)
        return [f"{folder}: {_size(folder):.1f} MB with the target", *_transformers_commands(folder)]
    refuse(drafter, loaded, to)
    where = resolve(loaded.name)
    where = str(Path(where).absolute()) if Path(where).is_dir() else where
    tokens = text(loaded, tokenizer)
    lines: list[str] = []
    with atomic(folder) as scratch:
        if isinstance(drafter, Eagle3):
            eagle3.write(drafter, loaded, scratch, "speculators" if to == "speculators" else "plain", where)
            lines.append(check_eagle3(scratch, drafter, loaded, tokens, to))
        elif isinstance(drafter, BlockDrafter):
            block.write(drafter, loaded, scratch)
            lines.append(check_block(scratch, drafter, loaded, tokens))
        elif isinstance(drafter, Mtp):
            mtp.write(drafter, loaded, _source(loaded), scratch)
            _copy_rest(_source(loaded), scratch)
            lines.append(check_mtp(scratch, drafter, loaded, tokens))
        elif isinstance(drafter, Medusa):
            parts = {"vllm": scratch / "vllm", "tgi": scratch / "tgi"} if to == "medusa" else {"vllm": scratch}
            medusa.write_vllm(drafter, loaded, parts["vllm"])
            if "tgi" in parts:
                medusa.write_tgi(drafter, loaded, parts["tgi"], where)
            lines += [check_medusa(part, drafter, loaded, tokens) for part in parts.values()]
    return [f"{folder}: {_size(folder):.1f} MB", *lines, *commands(drafter, to, folder, where)]


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


def _transformers_commands(folder: Path) -> list[str]:
    return [
        f"transformers serve {shlex.quote(str(folder))} --trust-remote-code   # without --continuous-batching",
        f"model = AutoModelForCausalLM.from_pretrained({str(folder)!r})",
        f"model.generate(**inputs, custom_generate={str(folder)!r}, trust_remote_code=True)",
    ]


def refuse(drafter: Drafter, target: Target, to: str) -> None:
    """Raises ValueError where a drafter has no such form, with the reason and what to train instead."""
    kind = drafter.kind
    if isinstance(drafter, Medusa):
        if to not in ("vllm", "medusa"):
            raise ValueError(
                f"{to} serves no Medusa heads (vLLM up to 0.32 and TGI do: --to medusa); train drafter=eagle3"
            )
        if target.lm_head.bias is not None:
            raise ValueError("the target's lm_head has a bias, which Medusa's files do not hold; train drafter=eagle3")
    elif isinstance(drafter, Eagle3):
        if target.lm_head.bias is not None and drafter.layer.lm_head is None:
            raise ValueError("the target's lm_head has a bias, which no draft model has; train with drafter.head=own")
        if to == "medusa":
            raise ValueError("an EAGLE-3 layer is no Medusa head; take --to vllm, sglang or speculators")
        if to == "sglang" and drafter.config.norm_before_residual:
            raise ValueError(
                "SGLang adds the state as it is, whatever norm_before_residual says; train with "
                "drafter.norm_before_residual=false, or take --to vllm"
            )
        if to == "sglang" and target.n_layers - 1 in drafter.reads:
            raise ValueError(
                f"drafter.layers={list(drafter.reads)}: SGLang reads states where they enter a layer, so never that of "
                f"the last, {target.n_layers - 1}; train with lower drafter.layers, or take --to vllm"
            )
    elif isinstance(drafter, Mtp):
        if to != "vllm":
            raise ValueError(
                f"{to}: a module is written into its target's checkpoint, which vLLM reads; take --to vllm"
            )
        if drafter.config.draft_vocab is not None:
            raise ValueError("engines give MTP modules the target's whole lm_head; train with drafter.draft_vocab=null")
    elif isinstance(drafter, BlockDrafter):
        if to != "vllm":
            raise ValueError(f"{to}: block drafters are written as vLLM reads them; take --to vllm")
        if target.lm_head.bias is not None:
            raise ValueError("the target's lm_head has a bias, which no draft model has; train drafter=eagle3")
        if drafter.config.predicts == "next" and not drafter.config.correction:
            raise ValueError("rows that predict the next token are DSpark's, with a drafter.correction above 0")
    else:
        raise ValueError(
            f"{kind} can not be exported to {to}: {_WHY.get(kind, 'no engine has a form for it')}; train drafter=eagle3"
        )


def text(target: Target, tokenizer: Tokenizer | None) -> Tensor:
    """Real text for checks, int64 [1, n]: this file. Random tokens where there is no tokenizer, or an empty one."""
    most = min(_TEXT, target.max_positions or _TEXT)
    ids: list[int] = [] if tokenizer is None else tokenizer(Path(__file__).read_text())["input_ids"]
    if len(ids) < most:
        return torch.randint(target.vocab_size, (1, most), generator=torch.Generator().manual_seed(0))
    return torch.tensor([ids[:most]])


@torch.no_grad()
def check_eagle3(folder: Path, drafter: Eagle3, target: Target, tokens: Tensor, to: str = "vllm") -> str:
    """Hold a written EAGLE-3 folder against its contract and the drafter. Raises ValueError naming what differs."""
    path = folder / "model.safetensors"
    config, tensors = eagle3.flat(read_config(folder)), read_tensors(path)
    layers = eagle3.layers_read(config, target.n_layers, folder)
    has_map = drafter.layer.lm_head is not None or drafter.vocabulary is not None
    hold(tensors, eagle3.contract(config, len(layers), has_map, folder), path)
    tokens, steps = tokens.to(target.device), max(1, min(drafter.depth, tokens.shape[1] - 3))
    out = target.text(tokens, False, reads=drafter.reads)
    ours = drafter.unrolled(tokens, out.features, steps)
    root = tokens.shape[1] - steps - 2
    readers = ["vllm"] if to == "speculators" or drafter.config.norm_before_residual else ["vllm", "sglang"]
    worst = 0.0
    for reader in readers:
        theirs = reference.eagle3(folder, target.model, tokens.cpu(), reader, root, steps)
        for step, (own_logits, read_logits) in enumerate(zip(ours, theirs, strict=True)):
            mine = drafter.of_vocabulary(own_logits[0, root + step]).float().cpu()
            full = read_logits if drafter.vocabulary is None else read_logits[drafter.vocabulary.cpu()]
            what = f"{folder} as {reader} reads it, draft step {step + 1}"
            worst = max(worst, _held(mine, full, _EXACT if target.dtype.itemsize > 2 else _ROUGH, what))
    readings = ", ".join(f"read as {reader}" for reader in readers)
    return f"checked: {len(tensors)} tensors; {readings}: logits of {steps} steps within {worst:.1e} of the drafter's"


@torch.no_grad()
def check_block(folder: Path, drafter: BlockDrafter, target: Target, tokens: Tensor) -> str:
    """Hold a written DFlash or DSpark folder against its contract and the drafter. Raises ValueError naming what
    differs."""
    path = folder / "model.safetensors"
    tensors = read_tensors(path)
    own = {name: tensor for name, tensor in tensors.items() if name != "lm_head.weight"}
    hold(own, block.contract(block.flat(read_config(folder)), folder), path)
    tokens, root = tokens.to(target.device), tokens.shape[1] - drafter.depth - 1
    stacked = drafter.stack.stacked(target.text(tokens, False, reads=drafter.reads).features)
    ours = drafter.along(
        tokens, torch.tensor([[root]], device=tokens.device), stacked.to(drafter.stack.trained_stack.fc.weight.dtype)
    )[0, 0]
    theirs, worst = reference.block(folder, target.model, tokens.cpu(), root), 0.0
    for depth, full in enumerate(theirs):
        mine = drafter.corrected(ours[depth], tokens[0, root + depth]).float().cpu()
        few = full if drafter.vocabulary is None else full[drafter.vocabulary.cpu()]
        worst = max(
            worst, _held(mine, few, _EXACT if target.dtype.itemsize > 2 else _ROUGH, f"{folder}, depth {depth}")
        )
    return f"checked: {len(tensors)} tensors; logits of {len(theirs)} depths within {worst:.1e} of the drafter's"


@torch.no_grad()
def check_mtp(folder: Path, drafter: Mtp, target: Target, tokens: Tensor) -> str:
    """Raises ValueError where the module that is read from the written checkpoint drafts other logits."""
    tokens, again = tokens.to(target.device), mtp.read(target, folder)
    features = target.text(tokens, False, reads=drafter.reads).features
    ours, theirs = (torch.stack(one.unrolled(tokens, features, 2)).float() for one in (drafter, again))
    error = _held(ours, theirs, _FOLDED if target.dtype.itemsize > 2 else _ROUGH, str(folder))
    return f"checked: logits of two steps of the module read back within {error:.1e} of the drafter's"


@torch.no_grad()
def check_medusa(folder: Path, drafter: Medusa, target: Target, tokens: Tensor) -> str:
    """Hold a written Medusa folder against its contract and the drafter. Raises ValueError naming what differs."""
    config = read_config(folder)
    if "medusa_num_heads" in config:
        tensors = read_tensors(folder / medusa.FILE)
    else:
        tensors = read_tensors(folder / "model.safetensors")
        hold(tensors, medusa.contract(config, folder), folder / "model.safetensors")
    root = tokens.shape[1] - 1
    hidden = target.text(tokens.to(target.device), False).hidden[0, root:]
    ours, theirs = drafter(hidden)[:, 0].float().cpu(), reference.medusa(folder, target.model, tokens, root)
    folded = drafter.shared is not None and target.saved_dtype.itemsize < 4
    tolerance = _ROUGH if target.dtype.itemsize < 4 else _FOLDED if folded else _EXACT
    worst = max(
        _held(mine, read, tolerance, f"{folder}, head {i}")
        for i, (mine, read) in enumerate(zip(ours, theirs, strict=True))
    )
    return f"checked: {len(tensors)} tensors; logits of {len(theirs)} heads within {worst:.1e} of the drafter's"


def _held(ours: Tensor, theirs: Tensor, tolerance: float, what: str) -> float:
    """The relative error of logits as they were read. Raises ValueError where it is beyond what rounding does."""
    error = float((ours - theirs).norm() / ours.norm())
    if not error <= tolerance:
        raise ValueError(
            f"{what}: logits differ from the drafter's by {error:.2g} of their norm; the file does not say what the "
            "drafter computes"
        )
    return error


def commands(drafter: Drafter, to: str, folder: Path, target: str) -> list[str]:
    """What serves the folder. A chain is drafted as deep as the drafter was trained for."""
    assert isinstance(drafter, (BlockDrafter, Eagle3, Medusa, Mtp))
    at, name = folder.absolute(), shlex.quote(target)
    if isinstance(drafter, Mtp):
        method = {"method": "mtp", "num_speculative_tokens": drafter.depth}
        return [f"vllm serve {shlex.quote(str(at))} --speculative-config {shlex.quote(json.dumps(method))}"]
    inner = at / "vllm" if to == "medusa" else at
    kind = ("dspark" if drafter.config.correction else "dflash") if isinstance(drafter, BlockDrafter) else drafter.kind
    method = {"method": kind, "model": str(inner), "num_speculative_tokens": drafter.depth}
    vllm = f"vllm serve {name} --speculative-config {shlex.quote(json.dumps(method))}"
    if isinstance(drafter, Medusa):
        lines = [f"{vllm}   # vLLM up to 0.32"]
        return lines + (
            [f"text-generation-launcher --model-id {shlex.quote(str(at / 'tgi'))}"] if to == "medusa" else []
        )
    if to == "speculators":
        return [f"vllm serve {shlex.quote(str(at))}"]
    if to == "sglang":
        return [
            f"python -m sglang.launch_server --model-path {name} --speculative-algorithm EAGLE3 "
            f"--speculative-draft-model-path {shlex.quote(str(at))} --speculative-num-steps {drafter.depth} "
            f"--speculative-eagle-topk {drafter.config.width} --speculative-num-draft-tokens 16"
        ]
    return [vllm]
