"""Tiny transformers models of every family the experts interface serves, built from a config: no download, fp32."""

from __future__ import annotations

import torch

_BASE = {
    "vocab_size": 64,
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "intermediate_size": 96,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_MLA = {
    "q_lora_rank": 32,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 16,
    "num_key_value_heads": 4,
}

# family -> (config class, model class, what differs from _BASE, modules that convert() must replace)
FAMILIES = {
    "qwen3_moe": (
        "Qwen3MoeConfig",
        "Qwen3MoeForCausalLM",
        {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "head_dim": 16},
        ["model.layers.0.mlp.experts", "model.layers.1.mlp.experts"],
    ),
    "qwen2_moe": (
        "Qwen2MoeConfig",
        "Qwen2MoeForCausalLM",
        {
            "num_experts": 6,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 32,
            "shared_expert_intermediate_size": 64,
        },
        ["model.layers.0.mlp.experts", "model.layers.1.mlp.experts"],
    ),
    "mixtral": (
        "MixtralConfig",
        "MixtralForCausalLM",
        {"num_local_experts": 4, "num_experts_per_tok": 2},
        ["model.layers.0.mlp.experts", "model.layers.1.mlp.experts"],
    ),
    "olmoe": (
        "OlmoeConfig",
        "OlmoeForCausalLM",
        {"num_experts": 8, "num_experts_per_tok": 3, "intermediate_size": 32},
        ["model.layers.0.mlp.experts", "model.layers.1.mlp.experts"],
    ),
    "deepseek_v3": (
        "DeepseekV3Config",
        "DeepseekV3ForCausalLM",
        dict(
            n_routed_experts=8,
            num_experts_per_tok=2,
            moe_intermediate_size=32,
            n_shared_experts=1,
            n_group=2,
            topk_group=1,
            first_k_dense_replace=1,
            **_MLA,
        ),
        ["model.layers.1.mlp.experts"],
    ),
    "gpt_oss": (
        "GptOssConfig",
        "GptOssForCausalLM",
        {"num_local_experts": 6, "num_experts_per_tok": 2, "head_dim": 16, "intermediate_size": 64},
        ["model.layers.0.mlp.experts", "model.layers.1.mlp.experts"],
    ),
    "granitemoe": (
        "GraniteMoeConfig",
        "GraniteMoeForCausalLM",
        {"num_local_experts": 4, "num_experts_per_tok": 2},
        ["model.layers.0.block_sparse_moe.experts", "model.layers.1.block_sparse_moe.experts"],
    ),
    "phimoe": (
        "PhimoeConfig",
        "PhimoeForCausalLM",
        {"num_local_experts": 4, "num_experts_per_tok": 2},
        ["model.layers.0.mlp.experts", "model.layers.1.mlp.experts"],
    ),
    "glm4_moe": (
        "Glm4MoeConfig",
        "Glm4MoeForCausalLM",
        {
            "n_routed_experts": 8,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 32,
            "n_shared_experts": 1,
            "n_group": 1,
            "topk_group": 1,
            "first_k_dense_replace": 1,
            "head_dim": 16,
        },
        ["model.layers.1.mlp.experts"],
    ),
    "ernie4_5_moe": (
        "Ernie4_5_MoeConfig",
        "Ernie4_5_MoeForCausalLM",
        {
            "moe_num_experts": 4,
            "moe_k": 2,
            "moe_intermediate_size": 32,
            "moe_num_shared_experts": 1,
            "moe_layer_start_index": 0,
            "moe_layer_end_index": 1,
        },
        ["model.layers.0.mlp.experts", "model.layers.1.mlp.experts"],
    ),
    "minimax_m2": (
        "MiniMaxM2Config",
        "MiniMaxM2ForCausalLM",
        {"num_local_experts": 4, "num_experts_per_tok": 2, "intermediate_size": 32, "head_dim": 16},
        ["model.layers.0.mlp.experts", "model.layers.1.mlp.experts"],
    ),
    "nemotron_h": (
        "NemotronHConfig",
        "NemotronHForCausalLM",
        {
            "layers_block_type": ["attention", "moe"],
            "n_routed_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 32,
            "moe_shared_expert_intermediate_size": 32,
            "n_group": 1,
            "topk_group": 1,
            "head_dim": 16,
        },
        ["model.layers.1.mixer.experts"],
    ),
}
IGNORED = {
    "llama4": (
        "Llama4TextConfig",
        "Llama4ForCausalLM",
        {
            "num_local_experts": 4,
            "num_experts_per_tok": 1,
            "intermediate_size": 32,
            "intermediate_size_mlp": 96,
            "head_dim": 16,
        },
        ["model.layers.0.feed_forward.experts", "model.layers.1.feed_forward.experts"],
    ),
    "jetmoe": (
        "JetMoeConfig",
        "JetMoeForCausalLM",
        {"num_local_experts": 4, "num_experts_per_tok": 2, "kv_channels": 16},
        [],
    ),
}


def tiny(family: str, *, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.nn.Module:
    """A randomly initialised model of ``family`` on the CPU; large enough weights that the experts matter."""
    import transformers

    config_class, model_class, changes, _ = {**FAMILIES, **IGNORED}[family]
    config = getattr(transformers, config_class)(**{**_BASE, **changes})
    config._experts_implementation = "eager"
    torch.manual_seed(seed)
    model = getattr(transformers, model_class)(config)
    with torch.no_grad():
        for p in model.parameters():
            if p.ndim >= 2:
                p.normal_(0, p.shape[-1] ** -0.5)
    return model.to(dtype)


def token_ids(batch: int = 2, length: int = 24) -> torch.Tensor:
    """Token ids for ``tiny`` models."""
    return torch.randint(3, 64, (batch, length), generator=torch.Generator().manual_seed(1))
