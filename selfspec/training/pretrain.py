"""Train a small model and its tokenizer from scratch: how the embedded target was made.

Two stages: text, then, where `instruct` is given, that text mixed with verifiable instructions in a chat template.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from huggingface_hub.errors import StrictDataclassError
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, pre_tokenizers, trainers
from tokenizers.pre_tokenizers import ByteLevel, Digits
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel, PreTrainedTokenizerFast
from transformers import PreTrainedTokenizerBase as Tokenizer

from selfspec.core.support import layer_stack
from selfspec.data import chat
from selfspec.data.chat_template import ChatTemplate
from selfspec.data.corpus import Document
from selfspec.data.instructions import conversations, instructions
from selfspec.data.packing import Packed
from selfspec.data.store import Corpus, in_a_row, tokenize
from selfspec.data.tasks import TASKS, pool
from selfspec.training.checkpoint import checkpoint_path
from selfspec.training.loop import Loop, average
from selfspec.training.loop_config import LoopConfig
from selfspec.utils.checks import at_least, shares
from selfspec.utils.errors import one_line
from selfspec.utils.files import Figures, atomic
from selfspec.utils.tracking import RunLog

BEGIN = "<|endoftext|>"
_HELD_OUT = 200  # instructions that validate the second stage


@dataclass
class ModelConfig:
    """A model with tied embeddings. model_type: of transformers, such as llama or qwen3_5_text; vocab_size,
    hidden_size, intermediate_size, num_hidden_layers, num_attention_heads, num_key_value_heads,
    max_position_embeddings: as in its config; more: other settings of its config."""

    model_type: str = "llama"
    vocab_size: int = 4096
    hidden_size: int = 384
    intermediate_size: int = 1024
    num_hidden_layers: int = 6
    num_attention_heads: int = 6
    num_key_value_heads: int = 6
    max_position_embeddings: int = 1024
    more: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        at_least(self, "pretrain.model", 1, *(name for name, value in vars(self).items() if type(value) is int))

    def build(self, **settings: Any) -> PreTrainedModel:
        """The model, with random weights. Raises ValueError for a type that transformers does not know, or settings
        that its config refuses."""
        sizes = {name: value for name, value in asdict(self).items() if name not in ("model_type", "more")}
        settings |= {"tie_word_embeddings": True, "initializer_range": self.hidden_size**-0.5 / 2}
        try:
            config = AutoConfig.for_model(self.model_type, **sizes, **settings, **self.more)
            model: PreTrainedModel = AutoModelForCausalLM.from_config(config, attn_implementation="sdpa")
            model(input_ids=torch.zeros(1, 2, dtype=torch.long))
        except (ValueError, TypeError, RuntimeError, ArithmeticError, StrictDataclassError) as error:
            raise ValueError(f"pretrain.model makes no model of type {self.model_type!r}: {one_line(error)}") from error
        return model


@dataclass
class InstructConfig:
    """The second stage. steps: of the optimizer (0: there is no second stage); batch_size, decay: as those of the loop,
    whose other values are the first stage's; count: instructions, each seen once or more; length: tokens per row;
    source_share: of rows that are the first stage's text; muon_lr, adam_lr: as in the first stage."""

    count: int = 60000
    length: int = 512
    source_share: float = 0.35
    steps: int = 0
    batch_size: int = 12
    decay: float = 0.8
    muon_lr: float = 0.01
    adam_lr: float = 1.5e-3

    def __post_init__(self) -> None:
        at_least(self, "pretrain.instruct", 1, "count", "length", "batch_size")
        at_least(self, "pretrain.instruct", 0, "steps")
        shares(self, "pretrain.instruct", "source_share", ends="[)")
        shares(self, "pretrain.instruct", "decay")


@dataclass
class PretrainConfig:
    """length: tokens per row; muon_lr: for the layers' matrices; adam_lr: for everything else; tokenizer: whose
    tokenizer to take, an embedded name, a folder or a hub id (None: train one on the text); init: a trained
    model and its tokenizer (an embedded name, a folder or a hub id): the first stage is skipped and the second starts
    from it; instruct: the second stage."""

    length: int = 1024
    muon_lr: float = 0.02
    adam_lr: float = 3e-3
    tokenizer: str | None = None
    init: str | None = None
    model: ModelConfig = field(default_factory=ModelConfig)
    instruct: InstructConfig = field(default_factory=InstructConfig)

    def __post_init__(self) -> None:
        at_least(self, "pretrain", 1, "length")
        if self.init is not None and not self.instruct.steps:
            why = "skips the first stage, and pretrain.instruct.steps=0 the second"
            raise ValueError(f"pretrain.init={self.init!r} {why}")


def train_tokenizer(texts: Iterable[str], vocab_size: int) -> Tokenizer:
    """Byte-level BPE: every string has an encoding, and decoding gives it back."""
    tokenizer = Backend(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[BEGIN],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token=BEGIN, eos_token=BEGIN, clean_up_tokenization_spaces=False
    )


def chat_tokenizer(tokenizer: Tokenizer) -> Tokenizer:
    """A copy with a chat template, a token for each of its roles and for the end of a turn, which becomes the EOS
    token; numbers are cut into digits. Texts keep decoding to themselves. Raises ValueError for a tokenizer that has no
    BOS token, or is not byte-level."""
    if not isinstance(tokenizer, PreTrainedTokenizerFast) or tokenizer.bos_token is None:
        raise ValueError(
            f"tokenizer {tokenizer.name_or_path!r} must be a byte-level one of the tokenizers library with a BOS token"
        )
    backend = Backend.from_str(tokenizer.backend_tokenizer.to_str())
    backend.pre_tokenizer = pre_tokenizers.Sequence([Digits(individual_digits=True), ByteLevel(add_prefix_space=False)])
    chatting = PreTrainedTokenizerFast(
        tokenizer_object=backend, bos_token=tokenizer.bos_token, clean_up_tokenization_spaces=False
    )
    roles = [f"<|{role}|>" for role in chat.ROLES]
    chatting.add_special_tokens(
        {"eos_token": chat.END, "pad_token": chatting.bos_token, "additional_special_tokens": roles}
    )
    chatting.chat_template = chat.TEMPLATE
    return chatting


class NextToken(nn.Module):
    """Cross-entropy of the next token in nats, over the tokens (int64 [B, S]) that `mask` (bool [B, S]) counts.
    average: see `Batch`."""

    def __init__(self, model: nn.Module, average: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.model, self.average = model, average

    def counts(self, batch: dict[str, Tensor]) -> Tensor:
        """float [1]"""
        return batch["mask"][:, 1:].sum().float()[None]

    def forward(self, batch: dict[str, Tensor], counts: Tensor | None = None) -> tuple[Tensor, dict[str, Tensor]]:
        """counts: of all parts of a step, [1]."""
        logits = self.model(input_ids=batch["tokens"], use_cache=False).logits[:, :-1]
        losses = nn.functional.cross_entropy(
            logits.float().flatten(0, 1), batch["tokens"][:, 1:].flatten(), reduction="none"
        )
        counted = batch["mask"][:, 1:].flatten()
        if counts is None:
            counts = self.average(self.counts(batch)) if self.training else self.counts(batch)
        return (losses * counted).sum() / counts[0].clamp(min=1e-30), {}


def pretrain(
    train: list[Document],
    validation: list[Document],
    config: PretrainConfig,
    given: Tokenizer | None,
    loop: LoopConfig,
    folder: Path,
    log: RunLog,
) -> Figures:
    """The first stage: train a model, and a tokenizer where None is given, into `folder/target`; figures hold bits per
    byte on the validation documents. Raises ValueError for a tokenizer of another vocabulary than the model's."""
    accelerator = Accelerator(cpu=not torch.cuda.is_available(), mixed_precision="no")
    kept = next((folder / name for name in ("tokenizer", "target") if (folder / name).is_dir()), None)
    if given is None and kept is not None and checkpoint_path(folder).is_file():  # the texts may be others by now
        given = PreTrainedTokenizerFast.from_pretrained(kept)
    tokenizer = given or train_tokenizer((d.text for d in train), config.model.vocab_size)
    if len(tokenizer) > config.model.vocab_size:
        raise ValueError(
            f"pretrain.tokenizer={config.tokenizer!r} has {len(tokenizer)} tokens; give at least that many as "
            f"pretrain.model.vocab_size (now {config.model.vocab_size})"
        )
    torch.manual_seed(loop.seed)
    model = config.model.build(bos_token_id=tokenizer.bos_token_id, eos_token_id=tokenizer.eos_token_id)
    if accelerator.is_main_process and not checkpoint_path(folder).is_file():
        with atomic(folder / "tokenizer") as scratch:
            tokenizer.save_pretrained(scratch)
    among = loop.seed, accelerator.process_index, accelerator.num_processes
    batches = Packed(tokenize(train, tokenizer), config.length, loop.batch_size, *among)
    held_out = {"": tokenize(validation, tokenizer)}
    lr = config.muon_lr, config.adam_lr
    return _stage(accelerator, model, tokenizer, batches, held_out, lr, loop, folder, log, {})


def check_second_stage(
    train: list[Document],
    validation: list[Document],
    tokenizer: Tokenizer | None,
    config: InstructConfig,
    loop: LoopConfig,
) -> None:
    """Raises ValueError for what `instruct` would refuse once the first stage is trained. tokenizer: that is given."""
    replace(loop, steps=config.steps, batch_size=config.batch_size, decay=config.decay)
    if tokenizer is not None and not tokenizer.chat_template:
        chat_tokenizer(tokenizer)
    if tokenizer is not None and tokenizer.chat_template and tokenizer.eos_token is None:
        raise ValueError(f"tokenizer {tokenizer.name_or_path!r} has a chat template and no EOS token that ends a turn")
    for documents, split in ((train, "train"), (validation, "validation")):
        pool(documents, split)


def instruct(
    train: list[Document],
    validation: list[Document],
    model: PreTrainedModel,
    tokenizer: Tokenizer,
    config: InstructConfig,
    loop: LoopConfig,
    folder: Path,
    log: RunLog,
    before: Figures,
) -> Figures:
    """The second stage: the first's text mixed with instructions made of it, in a chat template; only answers count in
    the loss of an instruction. Into `folder/target`. before: seconds and tokens of the first stage."""
    accelerator = Accelerator(cpu=not torch.cuda.is_available(), mixed_precision="no")
    if not tokenizer.chat_template:
        tokenizer = chat_tokenizer(tokenizer)
        torch.manual_seed(loop.seed)  # of the new rows
        model.resize_token_embeddings(len(tokenizer))
    ends = [token for token in (tokenizer.bos_token_id, tokenizer.eos_token_id) if token is not None]
    model.config.eos_token_id = ends
    if model.generation_config is not None:
        model.generation_config.eos_token_id = ends
    groups = list(TASKS)
    training_set = instructions(pool(train, "train"), groups, config.count, loop.seed)
    template = ChatTemplate(tokenizer)
    talks = tokenize(conversations(training_set, template, loop.seed), tokenizer)
    source = tokenize(train, tokenizer)
    if len(source.tokens) <= config.length:
        raise ValueError(
            f"no usable example: {len(source.tokens)} tokens of text, pretrain.instruct.length={config.length}"
        )
    count = Packed(talks, config.length, 1, loop.seed).per_epoch
    many = round(count * config.source_share / (1 - config.source_share))
    g = torch.Generator().manual_seed(loop.seed)
    starts = torch.randint(len(source.tokens) - config.length, (many,), generator=g).tolist()
    documents = [(talk.tokens, talk.mask) for talk in map(talks.document, range(len(talks.is_chat)))]
    documents += [(source.tokens[at : at + config.length], source.mask[at : at + config.length]) for at in starts]
    texts = in_a_row(documents, torch.zeros(len(documents), dtype=torch.bool), source.begins)
    loop = replace(loop, steps=config.steps, batch_size=config.batch_size, decay=config.decay)
    among = loop.seed, accelerator.process_index, accelerator.num_processes
    batches = Packed(texts, config.length, loop.batch_size, *among, ends[0])
    held_out_set = instructions(pool(validation, "validation"), groups, _HELD_OUT, loop.seed)
    answers = tokenize(conversations(held_out_set, template, loop.seed), tokenizer)
    held_out = {"": tokenize(validation, tokenizer), "answer_": answers}
    lr = config.muon_lr, config.adam_lr
    return _stage(accelerator, model, tokenizer, batches, held_out, lr, loop, folder, log, before)


def _stage(
    accelerator: Accelerator,
    model: PreTrainedModel,
    tokenizer: Tokenizer,
    batches: Packed,
    held_out: dict[str, Corpus],
    lr: tuple[float, float],
    loop: LoopConfig,
    folder: Path,
    log: RunLog,
    before: Figures,
) -> Figures:
    """Train with Muon for the layers' matrices and AdamW for everything else (two peak rates); figures by the names in
    `held_out`."""
    log.begin()
    model.to(accelerator.device)
    matrices = [p for p in layer_stack(model).parameters() if p.ndim == 2]
    ids = {id(p) for p in matrices}
    rest = [p for p in model.parameters() if id(p) not in ids]
    optimizers: list[torch.optim.Optimizer] = [
        torch.optim.Muon(matrices, lr=lr[0], adjust_lr_fn="original"),
        torch.optim.AdamW(rest, lr=lr[1], betas=(0.9, 0.95), weight_decay=0.0),
    ]
    module = NextToken(model, average(accelerator))

    validated = {name: Packed(corpus, batches.length, 1, 0) for name, corpus in held_out.items()}

    def validate() -> Figures:
        figures: Figures = {}
        for name, packed in validated.items():
            rows = [packed.rows([i]) for i in range(packed.per_epoch)]
            counts = torch.tensor([float(row["mask"][:, 1:].sum()) for row in rows])
            nats = torch.tensor(
                [float(module({k: v.to(accelerator.device) for k, v in row.items()})[0]) for row in rows]
            )
            mean = float((nats * counts).sum() / counts.sum())
            figures[f"{name}nats_per_token"] = mean
            if not name:
                predicted = len(packed.corpus.tokens) - len(packed.corpus.is_chat)  # not where documents begin
                figures["bits_per_byte"] = mean / math.log(2) * predicted / packed.corpus.n_bytes
        return figures

    keys = [packed.corpus.key for packed in (batches, *validated.values())]
    beside = folder, log, "bits_per_byte", (keys[0], " ".join(keys[1:]))
    figures = Loop(accelerator, module, optimizers, batches.batch, validate, loop, *beside).fit()
    if accelerator.is_main_process:
        with atomic(folder / "target") as scratch:
            model.bfloat16().save_pretrained(scratch)
            tokenizer.save_pretrained(scratch)
            took = {"seconds": figures["seconds"], "tokens": figures["steps"] * batches.size * batches.length}
            both = {name: value + before.get(name, 0) for name, value in took.items()}
            (scratch / "training.json").write_text(json.dumps(both) + "\n")
    accelerator.wait_for_everyone()
    return figures
