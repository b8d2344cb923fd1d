"""Names and forms of multi-token prediction modules, family by family.

Sources: the checkpoints' indexes, and how transformers, vLLM and SGLang read them.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from selfspec.core.target import Target

FIRST = "as the first"


@dataclass(frozen=True)
class Family:
    """Names behind `prefix`, in which {k} is the module's index and {at} that plus the number of the target's layers;
    norm: the final one (None: there is none); block: of the decoder layer's tensors; renamed: parts of their names, as
    published and as transformers has them; form: of the decoder layer, see `MtpConfig` (`FIRST`: attention as in the
    target's first layer); count: the config's name for the number of modules."""

    prefix: str = "model.layers.{at}."
    enorm: str = "enorm.weight"
    hnorm: str = "hnorm.weight"
    proj: str = "eh_proj.weight"
    norm: str | None = "shared_head.norm.weight"
    block: str = ""
    renamed: tuple[tuple[str, str], ...] = ()
    form: tuple[str, str] | None = None
    count: str = "num_nextn_predict_layers"

    def module(self, target: Target, k: int) -> str:
        """The prefix of module k."""
        return self.prefix.format(at=target.n_layers + k, k=k)

    def ours(self, name: str) -> str:
        """A published tensor's name behind the prefix, as transformers has it."""
        for published, known in self.renamed:
            name = name.replace(published, known)
        return name

    def layer_form(self, target: Target) -> tuple[str, ...] | None:
        """What a module's layer is, as the target's config or the family says; None where it is as the target's last
        one."""
        config = target.model.config.get_text_config()
        for name in ("mtp_layers_block_type", "mtp_layer_types", "mtp_mlp_layer_types"):
            kinds = getattr(config, name, None)
            if kinds is not None and not (isinstance(kinds, list) and all(isinstance(kind, str) for kind in kinds)):
                raise ValueError(f"the target's config.json: {name}={kinds!r:.200} must list kinds of layers")
        if row := getattr(config, "mtp_layers_block_type", None):  # of a family whose MLPs are layers of their own
            return tuple(row)
        form: list[str | None] = [None, None] if self.form is None else [*self.form]
        for i, name in enumerate(("mtp_layer_types", "mtp_mlp_layer_types")):
            form[i] = next(iter(getattr(config, name, None) or []), form[i])
        first, last = ([(getattr(config, name, None) or [None])[at] for name in _KINDS] for at in (0, -1))
        form = [first[0] if kind == FIRST else kind or other for kind, other in zip(form, last, strict=True)]
        return None if form == last or None in form else tuple(map(str, form))


_KINDS = "layer_types", "mlp_layer_types"
_DEEPSEEK = Family()
_NORMS = "pre_fc_norm_embedding.weight", "pre_fc_norm_hidden.weight"
_QWEN = Family("mtp.", *_NORMS, "fc.weight", "norm.weight", "layers.0.")
_HY = (
    ("mlp.router.gate.", "mlp.gate."),
    ("mlp.expert_bias", "mlp.e_score_correction_bias"),
    ("mlp.shared_mlp.", "mlp.shared_experts."),
)
_ERNIE = Family("model.mtp_", "emb_norm.0.weight", "hidden_norm.0.weight", "linear_proj.0.weight", None, "block.0.")
_MIMO = (("pre_mlp_layernorm.", "post_attention_layernorm."), ("self_attn.attention_sink_bias", "self_attn.sinks"))
_BAILING = (
    ("attention.dense.", "self_attn.o_proj."),
    ("attention.", "self_attn."),
    ("mlp.gate.expert_bias", "mlp.gate.e_score_correction_bias"),
)
_FINAL = "final_layernorm.weight"
FAMILIES = {
    "deepseek_v3": _DEEPSEEK,
    "glm4_moe": _DEEPSEEK,
    "glm4_moe_lite": _DEEPSEEK,
    "qwen3_next": _QWEN,
    "qwen3_5_text": replace(_QWEN, count="mtp_num_hidden_layers"),
    "qwen3_5_moe_text": replace(_QWEN, count="mtp_num_hidden_layers"),
    "exaone_moe": replace(_QWEN, form=(FIRST, "dense")),
    "mellum": _QWEN,
    "hy_v3": Family(norm=_FINAL, renamed=_HY),
    "ernie4_5": _ERNIE,
    "ernie4_5_moe": replace(_ERNIE, form=("full_attention", "dense")),
    "mimo_v2_flash": Family("model.mtp.layers.{k}.", norm=_FINAL, renamed=_MIMO, form=("sliding_attention", "dense")),
    "bailing_hybrid": Family(norm=_FINAL, renamed=_BAILING, form=("full_attention", "sparse")),
    "nemotron_h": Family(
        "mtp.layers.", "0.enorm.weight", "0.hnorm.weight", "0.eh_proj.weight", "1.final_layernorm.weight"
    ),
}
