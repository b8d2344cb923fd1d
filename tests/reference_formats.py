"""What serving engines compute with a written draft model: a reading of the files of its own, in plain tensors.

Exports are held against it. It shares no code with the drafters, nor with what writes the files.
"""

import json
import math
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor
from torch.nn.functional import embedding, linear, scaled_dot_product_attention, silu
from transformers import LlamaConfig, PreTrainedModel
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding


@torch.no_grad()
def eagle3(folder: Path, model: PreTrainedModel, tokens: Tensor, reader: str, root: int, steps: int) -> list[Tensor]:
    """Logits [V] of `steps` draft steps of an EAGLE-3 or P-EAGLE folder, in float32. The first follows
    `tokens`[:root + 2]; each later step appends the text's next token, as if it had been drafted, or a mask. reader:
    vllm, or sglang, which takes the layers from another key and knows no normed residual."""
    config, w = json.loads((folder / "config.json").read_text()), load_file(folder / "model.safetensors")
    w = {name: t.float() if t.is_floating_point() else t for name, t in w.items()}
    inner = config.get("transformer_layer_config", config)
    flags = {name: config.get(name, False) for name in ("norm_before_fc", "fc_norm", "norm_output")}
    before = config.get("norm_before_residual", "speculators_model_type" in config) and reader == "vllm"
    key, eps = "eagle_aux_hidden_state_layer_ids", inner["rms_norm_eps"]
    ids = config[key] if reader == "vllm" else [layer + 1 for layer in config["eagle_config"][key]]
    states_seen = hidden_states(model, tokens)
    aux = [states_seen[v][0, : root + 1].float() for v in ids]  # [n, H] each

    def norm(x: Tensor, name: str) -> Tensor:
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps) * w[f"{name}.weight"]

    def project(x: Tensor, name: str) -> Tensor:
        return linear(x, w[f"{name}.weight"], w.get(f"{name}.bias"))

    def fused(f: Tensor) -> Tensor:
        f = norm(f, "input_norm") if flags["norm_before_fc"] else f
        if flags["fc_norm"]:
            f = torch.cat([norm(part, f"fc_norm.{i}") for i, part in enumerate(f.chunk(len(aux), -1))], -1)
        return linear(f, w["fc.weight"])

    states, names = fused(torch.cat(aux, -1)), [f"layers.{i}" for i in range(inner["num_hidden_layers"])]
    w = {name.replace("midlayer.", "layers.0."): tensor for name, tensor in w.items()}
    heads, keys, width = (inner[name] for name in ("num_attention_heads", "num_key_value_heads", "head_dim"))
    embed = w.get("embed_tokens.weight", next(model.get_input_embeddings().parameters()).float().cpu())
    past: dict[str, list[tuple[Tensor, Tensor]]] = {name: [] for name in names}
    entering, after, result = states, tokens[0, 1 : root + 2], []
    for step in range(steps):
        positions = torch.arange(len(entering))[None] if step == 0 else torch.tensor([[root + step]])
        cos, sin = turns(config, inner, positions)
        e, r = norm(embedding(after, embed), "layers.0.input_layernorm"), entering
        for at in names:
            n = norm(r, f"{at}.hidden_norm" if at == "layers.0" else f"{at}.input_layernorm")
            read = torch.cat([e, n], -1) if at == "layers.0" else n
            q, k, v = (
                project(read, f"{at}.self_attn.{name}_proj").unflatten(-1, (count, width)).transpose(0, 1)
                for name, count in (("q", heads), ("k", keys), ("v", keys))
            )
            if f"{at}.self_attn.q_norm.weight" in w:
                q, k = norm(q, f"{at}.self_attn.q_norm"), norm(k, f"{at}.self_attn.k_norm")
            past[at].append((rotated(k, cos, sin), v))
            k, v = (torch.cat([pair[i] for pair in past[at]], 1).repeat_interleave(heads // keys, 0) for i in (0, 1))
            a = scaled_dot_product_attention(rotated(q, cos, sin), k, v, is_causal=step == 0)  # [heads, n, width]
            r = n if before and at == "layers.0" else r
            r = r + project(a.transpose(0, 1).flatten(1), f"{at}.self_attn.o_proj")
            x = norm(r, f"{at}.post_attention_layernorm")
            gated = silu(project(x, f"{at}.mlp.gate_proj")) * project(x, f"{at}.mlp.up_proj")
            r = r + project(gated, f"{at}.mlp.down_proj")
        out = norm(r, "norm")
        result.append(logits(out[-1], model, w))
        if "mask_hidden" in w:
            entering, after = fused(w["mask_hidden"].view(1, -1)), torch.tensor([config["mask_token_id"]])
        else:
            entering = (out if flags["norm_output"] else r)[-1:]
            after = tokens[0, root + 2 + step : root + 3 + step]
    return result


@torch.no_grad()
def block(folder: Path, model: PreTrainedModel, tokens: Tensor, root: int) -> list[Tensor]:
    """Logits [V] of each depth of a DFlash or DSpark folder, in float32, behind `tokens`[:root + 1]; a token that
    corrects its children is the text's own, as if it had been drafted."""
    config, w = json.loads((folder / "config.json").read_text()), load_file(folder / "model.safetensors")
    w = {name: t.float() if t.is_floating_point() else t for name, t in w.items()}
    nested, size, eps = config["dflash_config"], config["block_size"], config["rms_norm_eps"]
    heads, keys, width = (config[name] for name in ("num_attention_heads", "num_key_value_heads", "head_dim"))
    embed = next(model.get_input_embeddings().parameters()).float().cpu()
    mask = torch.load(folder / "mask_embedding.pt", weights_only=True).float()
    seen = hidden_states(model, tokens)

    def norm(x: Tensor, name: str) -> Tensor:
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps) * w[f"{name}.weight"]

    def heads_of(x: Tensor, name: str, count: int, normed: str | None) -> Tensor:
        x = linear(x, w[f"{name}.weight"], w.get(f"{name}.bias")).unflatten(-1, (count, width))
        return (x if normed is None else norm(x, normed)).transpose(0, 1)

    features = torch.cat([seen[layer + 1][0, :root].float() for layer in nested["target_layer_ids"]], -1)
    text = norm(linear(features, w["fc.weight"]), "hidden_norm")
    x = torch.cat([embed[tokens[0, root]][None], mask.expand(size - 1, -1)])
    before, own = (turns(config, config, at[None]) for at in (torch.arange(root), torch.arange(root, root + size)))
    far = torch.arange(root, root + size)[:, None] - torch.arange(root + size)
    for i in range(config["num_hidden_layers"]):
        slides = config["layer_types"][i] == "sliding_attention"
        allowed = (far < config["sliding_window"]) if slides else torch.ones_like(far, dtype=torch.bool)
        allowed = allowed & (far >= 0) if nested.get("causal", slides) else allowed
        at = f"layers.{i}.self_attn"
        n = norm(x, f"layers.{i}.input_layernorm")
        parts = [(text, before), (n, own)]
        k = torch.cat([rotated(heads_of(s, f"{at}.k_proj", keys, f"{at}.k_norm"), *turned) for s, turned in parts], 1)
        v = torch.cat([heads_of(s, f"{at}.v_proj", keys, None) for s, _ in parts], 1)
        q = rotated(heads_of(n, f"{at}.q_proj", heads, f"{at}.q_norm"), *own)
        k, v = (part.repeat_interleave(heads // keys, 0) for part in (k, v))
        read = scaled_dot_product_attention(q, k, v, allowed).transpose(0, 1).flatten(1)
        x = x + linear(read, w[f"{at}.o_proj.weight"], w.get(f"{at}.o_proj.bias"))
        n, mlp = norm(x, f"layers.{i}.post_attention_layernorm"), f"layers.{i}.mlp"
        gated = silu(linear(n, w[f"{mlp}.gate_proj.weight"])) * linear(n, w[f"{mlp}.up_proj.weight"])
        x = x + linear(gated, w[f"{mlp}.down_proj.weight"])
    rows = norm(x, "norm")[0 if nested["sample_from_anchor"] else 1 :]
    result, head = [], "markov_head"
    carried = torch.zeros(config.get("markov_rank", 0))
    for depth, row in enumerate(rows):
        scores = logits(row, model, w)
        if f"{head}.markov_w1.weight" in w:
            factor = w[f"{head}.markov_w1.weight"][tokens[0, root + depth]]
            if config["markov_head_type"] == "gated":
                gate = w[f"{head}.gate_proj.weight"] @ torch.cat([row, factor]) + w[f"{head}.gate_proj.bias"]
                factor = factor / (1 + (-gate).exp())
            elif config["markov_head_type"] == "rnn":
                z = w[f"{head}.joint_proj.weight"] @ torch.cat([carried, factor, row]) + w[f"{head}.joint_proj.bias"]
                keep, new, out = z.split(len(carried))
                carried = torch.lerp(new.tanh(), carried, 1 / (1 + (-keep).exp()))
                factor = out.tanh()
            added = w[f"{head}.markov_w2.weight"] @ factor
            ids = torch.arange(len(added)) + w.get("d2t", 0)
            scores = scores.index_add(0, ids, added)
        result.append(scores)
    return result


def logits(hidden: Tensor, model: PreTrainedModel, w: dict[str, Tensor]) -> Tensor:
    """Of all tokens, from the file's own head (those it can not draft are -inf) or the target's."""
    head = model.get_output_embeddings()
    if "lm_head.weight" not in w:
        return linear(hidden, head.weight.float().cpu())
    scores = linear(hidden, w["lm_head.weight"])
    if "d2t" not in w:
        return scores
    return torch.full((len(head.weight),), -torch.inf).scatter(0, torch.arange(len(scores)) + w["d2t"], scores)


@torch.no_grad()
def hidden_states(model: PreTrainedModel, tokens: Tensor) -> list[Tensor]:
    """Of a stock model [1, S, H]: the embeddings, and the state after each layer, before the final norm."""
    last: list[Tensor] = []
    layers = next(m for m in model.get_decoder().children() if isinstance(m, torch.nn.ModuleList) and len(m) > 0)
    hook = layers[-1].register_forward_hook(lambda m, a, out: last.append(out if isinstance(out, Tensor) else out[0]))
    try:
        out = model(input_ids=tokens.to(model.device), output_hidden_states=True, use_cache=False)
    finally:
        hook.remove()
    return [state.cpu() for state in (*out.hidden_states[:-1], last[0])]


def turns(config: dict[str, Any], inner: dict[str, Any], positions: Tensor) -> tuple[Tensor, Tensor]:
    """Cosines and sines of rotary positions [1, n, width]. Scaled kinds other than llama3 are transformers' own."""
    rope = {"rope_theta": config.get("rope_theta"), **(inner.get("rope_parameters") or {})}
    width, kind, most = inner["head_dim"], rope.get("rope_type", "default"), inner["max_position_embeddings"]
    if kind not in ("default", "llama3"):
        rope_config = LlamaConfig(head_dim=width, max_position_embeddings=most, rope_parameters=rope)
        return LlamaRotaryEmbedding(rope_config)(torch.zeros(1), positions)
    frequency = rope["rope_theta"] ** -(torch.arange(0, width, 2).float() / width)
    if kind == "llama3":
        turns_before = rope["original_max_position_embeddings"] * frequency / (2 * math.pi)  # over the original length
        low, high, factor = rope["low_freq_factor"], rope["high_freq_factor"], rope["factor"]
        share = ((turns_before - low) / (high - low)).clamp(0, 1)  # 0: slow, divided by factor; 1: fast, as it is
        frequency = (1 - share) * frequency / factor + share * frequency
    angles = positions[..., None].float() * torch.cat([frequency, frequency])
    return angles.cos(), angles.sin()


def rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary positions, x [heads, n, width], cos and sin [1, n, width]."""
    half = x.shape[-1] // 2
    return x * cos + torch.cat([-x[..., half:], x[..., :half]], -1) * sin


@torch.no_grad()
def medusa(folder: Path, model: PreTrainedModel, tokens: Tensor, root: int) -> list[Tensor]:
    """Logits [V] of every head of a Medusa folder at position `root`, as vLLM up to 0.32 reads `model.safetensors`, TGI
    `medusa_lm_head.safetensors`. float32."""
    config = json.loads((folder / "config.json").read_text())
    tgi = "medusa_num_heads" in config
    w = load_file(folder / ("medusa_lm_head.safetensors" if tgi else "model.safetensors"))
    heads = config["medusa_num_heads" if tgi else "num_heads"]
    layers = config["medusa_num_layers" if tgi else "num_hidden_layers"]
    biased = tgi or config.get("medusa_fc_bias", False)  # vLLM passes over biases without this key
    hidden = model.get_decoder()(input_ids=tokens.to(model.device), use_cache=False).last_hidden_state[0, root]
    result = []
    for i in range(heads):
        x = hidden.float().cpu()
        for j in range(layers):
            name = f"{i}.{j}.linear" if tgi else f"blocks.{i}.layers.{j}"
            x = x + silu(linear(x, w[f"{name}.weight"].float(), w[f"{name}.bias"].float() if biased else None))
        result.append(linear(x, w[f"{i}.{layers}.weight" if tgi else f"lm_heads.{i}.weight"].float()))
    return result
