"""Tiny models of architectures by name, from a seed."""

import torch
import transformers

OF_EXPERTS = dict(num_experts=4, num_experts_per_tok=2, moe_intermediate_size=64)


def make(name, **settings):
    torch.manual_seed(0)
    config = getattr(transformers, f"{name}Config")(**{**dict(
        vocab_size=64, hidden_size=64, intermediate_size=128, num_hidden_layers=2, head_dim=32,
        num_attention_heads=2, num_key_value_heads=1, eos_token_id=1, pad_token_id=0,
        bos_token_id=None, initializer_range=0.1), **settings})
    return getattr(transformers, f"{name}ForCausalLM")(config)
