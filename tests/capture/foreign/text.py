"""Language models and text encoders from transformers."""

from collections.abc import Callable
from typing import Any

import torch
import transformers

from tests.capture.foreign.model import NONE, Foreign, Run, encoded, generated

IDS = torch.arange(2, 22).reshape(2, 10)
PADDED = torch.tensor([[1] * 10, [0] * 4 + [1] * 6])
"""Attention mask in which the second sequence is shorter."""
TOKENS = 3
"""Number of tokens that each language model generates."""

SIZES = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "initializer_range": 0.2,  # makes scores differ
}
GROUPED = {**SIZES, "num_key_value_heads": 2, "head_dim": 8}
EXPERTS = {
    "num_experts": 4,
    "num_local_experts": 4,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
}
GPT = {
    "vocab_size": 64,
    "n_embd": 32,
    "n_layer": 2,
    "n_head": 4,
    "n_positions": 64,
    "initializer_range": 0.2,
}


def generating(model: Any, *args: Any, **options: Any) -> Run:
    """Return a run that generates greedily and returns the logits of every token."""
    chosen = {"max_new_tokens": TOKENS, "min_new_tokens": TOKENS, "do_sample": False}
    kept = {"return_dict_in_generate": True, "output_logits": True}

    def run() -> Any:
        result = model.generate(*args, **chosen, **kept, pad_token_id=0, **options)
        return [result.sequences, *result.logits]

    return run


def decoder(
    kind: str,
    config: dict[str, Any] = GROUPED,
    *,
    mask: Any = None,
    dtype: torch.dtype = torch.float32,
    **changes: Any,
) -> Callable[[], tuple[Any, Run]]:
    """Return a function that builds a causal language model and its run on two texts."""

    def build() -> tuple[Any, Run]:
        torch.manual_seed(0)
        made = transformers.AutoConfig.for_model(kind, **{**config, "pad_token_id": 0, **changes})
        made.eos_token_id = None
        model = transformers.AutoModelForCausalLM.from_config(made).eval().to(dtype)
        attention_mask = torch.ones_like(IDS) if mask is None else mask
        return model, generating(model, IDS, attention_mask=attention_mask)

    return build


def encoder(
    kind: str, config: dict[str, Any] = SIZES, **changes: Any
) -> Callable[[], tuple[Any, Run]]:
    """Return a function that builds an encoder and its run on two texts of different lengths."""

    def build() -> tuple[Any, Run]:
        torch.manual_seed(0)
        made = transformers.AutoConfig.for_model(kind, **{**config, **changes})
        model = transformers.AutoModel.from_config(made).eval()
        return model, lambda: model(IDS, attention_mask=PADDED.flip(1)).last_hidden_state

    return build


def translator(kind: str, **config: Any) -> Callable[[], tuple[Any, Run]]:
    """Return a function that builds an encoder-decoder model and its run."""

    def build() -> tuple[Any, Run]:
        torch.manual_seed(0)
        made = transformers.AutoConfig.for_model(kind, vocab_size=64, **config)
        made.eos_token_id = made.forced_eos_token_id = None
        model = transformers.AutoModelForSeq2SeqLM.from_config(made).eval()
        return model, generating(
            model, IDS, attention_mask=PADDED.flip(1), decoder_start_token_id=1
        )

    return build


BART = {
    "init_std": 0.2,
    "d_model": 32,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 32,
    "decoder_ffn_dim": 32,
    "max_position_embeddings": 32,
}
ALTERNATING = {"sliding_window": 4, "layer_types": ["sliding_attention", "full_attention"]}
LATENT = {
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 16,
    "v_head_dim": 16,
    "head_dim": 8,
    "num_key_value_heads": 4,
    "n_group": 2,
    "topk_group": 1,
    "first_k_dense_replace": 1,
}
REGISTRY = frozenset({"transformers"})

MODELS = [
    Foreign("Llama", decoder("llama"), generated(2)),
    Foreign("Llama (padded)", decoder("llama", mask=PADDED), generated(2)),
    Foreign("Llama (bfloat16)", decoder("llama", dtype=torch.bfloat16), generated(2)),
    Foreign("Llama (eager)", decoder("llama", attn_implementation="eager"), generated(2), REGISTRY),
    Foreign("Qwen 3", decoder("qwen3"), generated(2)),
    Foreign(
        "Qwen 3 Next",  # one of its two layers has linear attention
        decoder(
            "qwen3_next",
            **EXPERTS,
            layer_types=["linear_attention", "full_attention"],
            linear_num_key_heads=2,
            linear_num_value_heads=4,
            linear_key_head_dim=8,
            linear_value_head_dim=8,
            shared_expert_intermediate_size=16,
        ),
        generated(1),
    ),
    Foreign(
        "Gemma 2",
        decoder("gemma2", **ALTERNATING, attn_logit_softcapping=1.0),
        generated(2),
        REGISTRY,
    ),
    Foreign("gpt-oss", decoder("gpt_oss", **EXPERTS, **ALTERNATING), generated(2), REGISTRY),
    Foreign("DeepSeek V3", decoder("deepseek_v3", **LATENT, **EXPERTS), generated(2)),
    # All heads share one key, which also serves as the value.
    Foreign(
        "DeepSeek V4",
        decoder("deepseek_v4", **{**GROUPED, **LATENT, **EXPERTS, "head_dim": 16}),
        generated(2),
        REGISTRY,
    ),
    # The first layer has full attention; the second has a window, sinks and more or fewer heads.
    Foreign(
        "MiMo V2 Flash",
        decoder(
            "mimo_v2_flash",
            **EXPERTS,
            sliding_window=4,
            v_head_dim=4,
            swa_head_dim=8,
            swa_v_head_dim=4,
            swa_num_attention_heads=4,
            swa_num_key_value_heads=2,
            n_group=1,
            topk_group=1,
        ),
        generated(2),
        REGISTRY,
    ),
    Foreign(
        "Gemma 4",
        decoder(
            "gemma4_text",
            **ALTERNATING,
            global_head_dim=16,
            hidden_size_per_layer_input=0,
            num_kv_shared_layers=0,
        ),
        generated(2),
    ),
    Foreign(
        "Llama 4",
        decoder(
            "llama4_text",
            **EXPERTS,
            intermediate_size_mlp=32,
            attention_chunk_size=4,
            layer_types=["chunked_attention", "full_attention"],
        ),
        generated(2),
    ),
    Foreign(
        "MiniMax",
        decoder("minimax", **EXPERTS, layer_types=["linear_attention", "full_attention"]),
        generated(1),
    ),
    Foreign("Falcon", decoder("falcon", SIZES), generated(2)),
    Foreign("GPT-2", decoder("gpt2", GPT), generated(2)),
    Foreign("OPT", decoder("opt", SIZES, ffn_dim=32, word_embed_proj_dim=32), generated(2)),
    Foreign("Jamba", decoder("jamba", attn_layer_period=2, attn_layer_offset=1), generated(1)),
    Foreign("Mamba", decoder("mamba", {**SIZES, "state_size": 4}), NONE),
    Foreign(
        "Bloom",
        decoder("bloom", {"vocab_size": 64, "hidden_size": 32, "n_layer": 2, "n_head": 4}),
        NONE,
        unseen={"BloomAttention": 6},
    ),
    Foreign("BERT", encoder("bert"), encoded(2)),
    Foreign("ModernBERT", encoder("modernbert", pad_token_id=0), encoded(2)),
    Foreign("DeBERTa V2", encoder("deberta-v2"), NONE, unseen={"DisentangledSelfAttention": 2}),
    Foreign(
        # Each decoder layer attends to itself and to the encoder's output.
        "T5",
        translator("t5", d_model=32, d_kv=8, d_ff=32, num_layers=2, num_heads=4),
        encoded(2) + generated(4),
    ),
    Foreign("BART", translator("bart", **BART), encoded(2) + generated(4)),
]
