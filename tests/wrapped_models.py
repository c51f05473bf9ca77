"""The model that the tests of wrapped models save, the same in every process."""

import torch

from gated_llama import GatedLlamaConfig, GatedLlamaForCausalLM


IDS = torch.tensor([[5, 17, 33, 2, 60, 41]])


def tiny() -> GatedLlamaForCausalLM:
    """A gated language model with random gates."""
    torch.manual_seed(0)
    sizes = {"vocab_size": 96, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
    config = GatedLlamaConfig(**sizes, num_attention_heads=2, pad_token_id=0, gate_position="G1")
    model = GatedLlamaForCausalLM(config).eval()
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.g_proj.weight.normal_(std=0.5)
    return model
