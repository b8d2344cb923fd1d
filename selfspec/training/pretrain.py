"""Train a small Llama and its tokenizer from scratch: how the embedded target was made."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path

import torch
from accelerate import Accelerator
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerBase, PreTrainedTokenizerFast

from selfspec.data.corpus import Document
from selfspec.data.windows import Windows, consecutive, tokenize
from selfspec.log import Figures, RunLog, atomic
from selfspec.training.loop import LoopConfig, fit

END = "<|endoftext|>"


@dataclass
class ModelConfig:
    """The sizes of a Llama with tied embeddings."""

    vocab_size: int = 4096
    hidden_size: int = 384
    intermediate_size: int = 1024
    num_hidden_layers: int = 6
    num_attention_heads: int = 6
    num_key_value_heads: int = 6
    max_position_embeddings: int = 1024


@dataclass
class PretrainConfig:
    """length: tokens per row; muon_lr: for the layers' matrices; adam_lr: for everything else; tokenizer: whose
    tokenizer to take, an embedded name, a folder or a hub id (None: train one on the text)."""

    length: int = 1024
    muon_lr: float = 0.02
    adam_lr: float = 3e-3
    tokenizer: str | None = None
    model: ModelConfig = field(default_factory=ModelConfig)


def _check(config: PretrainConfig) -> None:
    """Raises ValueError for sizes that make no model."""
    sizes = {"length": config.length, **{f"model.{name}": value for name, value in asdict(config.model).items()}}
    for name, value in sizes.items():
        if value < 1:
            raise ValueError(f"pretrain.{name}={value} must be at least 1")
    for heads in ("num_attention_heads", "num_key_value_heads"):
        if config.model.hidden_size % (2 * getattr(config.model, heads)):
            raise ValueError(
                f"pretrain.model.hidden_size={config.model.hidden_size} must be a multiple of twice {heads}="
                f"{getattr(config.model, heads)}"
            )


def train_tokenizer(texts: Iterable[str], vocab_size: int) -> PreTrainedTokenizerFast:
    """Byte-level BPE: every string has an encoding, and decoding gives it back."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token=END, eos_token=END, clean_up_tokenization_spaces=False
    )


class NextToken(nn.Module):
    """Cross-entropy of the next token, in nats."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, batch: dict[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
        logits = self.model(input_ids=batch["tokens"], use_cache=False).logits[:, :-1]
        return nn.functional.cross_entropy(logits.float().flatten(0, 1), batch["tokens"][:, 1:].flatten()), {}


def pretrain(
    train: list[Document],
    validation: list[Document],
    config: PretrainConfig,
    tokenizer: PreTrainedTokenizerBase | None,
    loop: LoopConfig,
    folder: Path,
    log: RunLog,
) -> Figures:
    """Train a model, and a tokenizer where None is given, into `folder/target`; figures hold bits per byte on the
    validation documents. Raises ValueError for a tokenizer of another vocabulary than the model's."""
    _check(config)
    accelerator = Accelerator(cpu=not torch.cuda.is_available())
    if tokenizer is None:
        tokenizer = train_tokenizer((d.text for d in train), config.model.vocab_size)
    if len(tokenizer) > config.model.vocab_size:
        raise ValueError(
            f"pretrain.tokenizer={config.tokenizer!r} has {len(tokenizer)} tokens; give at least that many as "
            f"pretrain.model.vocab_size (now {config.model.vocab_size})"
        )
    torch.manual_seed(loop.seed)
    model = LlamaForCausalLM(
        LlamaConfig(
            **asdict(config.model),
            tie_word_embeddings=True,
            bos_token_id=tokenizer.bos_token_id,
            eos_token_id=tokenizer.eos_token_id,
            initializer_range=config.model.hidden_size**-0.5 / 2,
        )
    ).to(accelerator.device)
    matrices = [p for p in model.model.layers.parameters() if p.ndim == 2]
    ids = {id(p) for p in matrices}
    rest = [p for p in model.parameters() if id(p) not in ids]
    optimizers: list[torch.optim.Optimizer] = [
        torch.optim.Muon(matrices, lr=config.muon_lr, adjust_lr_fn="original"),
        torch.optim.AdamW(rest, lr=config.adam_lr, betas=(0.9, 0.95), weight_decay=0.0),
    ]
    windows = Windows(
        tokenize(train, tokenizer),
        config.length,
        loop.batch_size,
        loop.seed,
        accelerator.process_index,
        accelerator.num_processes,
    )
    stream = tokenize(validation, tokenizer)
    rows = consecutive(stream.tokens, config.length)
    module = NextToken(model)

    def validate() -> Figures:
        nats = [float(module({"tokens": row[None].to(accelerator.device)})[0]) for row in rows]
        mean = sum(nats) / len(nats)
        bits = mean / math.log(2) * len(stream.tokens) / stream.n_bytes
        return {"nats_per_token": mean, "bits_per_byte": bits}

    figures = fit(accelerator, module, optimizers, windows.batch, validate, loop, folder, log, headline="bits_per_byte")
    if accelerator.is_main_process:
        with atomic(folder / "target") as scratch:
            model.to(torch.bfloat16).save_pretrained(scratch)
            tokenizer.save_pretrained(scratch)
            tokens = loop.steps * loop.batch_size * config.length
            (scratch / "training.json").write_text(json.dumps({"seconds": figures["seconds"], "tokens": tokens}) + "\n")
    return figures
