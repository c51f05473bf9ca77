"""The paper release's checkpoint format: random weights in it, and a plain forward pass over them.

Format: github.com/qiuzh20/gated_attention, `modeling_qwen3.py`. q_proj holds, for each key/value head, the query rows
of the heads that read it and then their gate rows; one flag, `qkv_bias`, gives q, k, v and o_proj their biases.
"""

import torch


CONFIG = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "vocab_size": 96,
    "hidden_size": 40,
    "intermediate_size": 56,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "hidden_act": "silu",
    "max_position_embeddings": 64,
    "initializer_range": 0.02,
    "rms_norm_eps": 1e-6,
    "use_cache": True,
    "rope_theta": 50000.0,
    "rope_scaling": None,
    "use_sliding_window": False,
    "sliding_window": None,
    "max_window_layers": 28,
    "attention_bias": False,
    "attention_dropout": 0.0,
    "use_qk_norm": True,
    "qkv_bias": False,
    "headwise_attn_output_gate": False,
    "elementwise_attn_output_gate": False,
    "tie_word_embeddings": True,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": None,
    "torch_dtype": "float32",
}


def gate_width(config: dict) -> int:
    """Gate rows for each head."""
    return config["headwise_attn_output_gate"] or config["head_dim"] * config["elementwise_attn_output_gate"]


def random_weights(config: dict, seed: int = 0) -> dict[str, torch.Tensor]:
    """Tensors of the format whose sizes make attention, norms and gates matter."""
    generator = torch.Generator().manual_seed(seed)
    hidden, inner, dim = config["hidden_size"], config["intermediate_size"], config["head_dim"]
    heads, kv = config["num_attention_heads"], config["num_key_value_heads"] * dim
    attention = {"q": (heads * (dim + gate_width(config)), hidden), "k": (kv, hidden), "v": (kv, hidden)}
    attention["o"] = (hidden, heads * dim)
    shapes = {"model.embed_tokens.weight": (config["vocab_size"], hidden), "model.norm.weight": (hidden,)}
    if not config["tie_word_embeddings"]:
        shapes["lm_head.weight"] = (config["vocab_size"], hidden)
    for layer in range(config["num_hidden_layers"]):
        prefix = f"model.layers.{layer}."
        for name, shape in attention.items():
            shapes[f"{prefix}self_attn.{name}_proj.weight"] = shape
            if config["qkv_bias"]:
                shapes[f"{prefix}self_attn.{name}_proj.bias"] = shape[:1]
        if config["use_qk_norm"]:
            shapes |= {f"{prefix}self_attn.{name}_norm.weight": (dim,) for name in "qk"}
        shapes |= {f"{prefix}{name}_layernorm.weight": (hidden,) for name in ("input", "post_attention")}
        shapes |= {f"{prefix}mlp.{name}_proj.weight": (inner, hidden) for name in ("gate", "up")}
        shapes[f"{prefix}mlp.down_proj.weight"] = (hidden, inner)
    tensors = {name: torch.randn(shape, generator=generator) * 0.2 for name, shape in shapes.items()}
    return {name: 1 + t if name.endswith("norm.weight") else t for name, t in tensors.items()}


def logits(config: dict, weights: dict[str, torch.Tensor], ids: torch.Tensor) -> torch.Tensor:
    """[batch, tokens, vocabulary], one head at a time."""
    x = weights["model.embed_tokens.weight"][ids]
    for layer in range(config["num_hidden_layers"]):
        prefix = f"model.layers.{layer}."
        x = x + attention(config, weights, f"{prefix}self_attn.", norm(config, weights, f"{prefix}input_layernorm", x))
        y = norm(config, weights, f"{prefix}post_attention_layernorm", x)
        gate = torch.nn.functional.silu(linear(weights, f"{prefix}mlp.gate_proj", y))
        x = x + linear(weights, f"{prefix}mlp.down_proj", gate * linear(weights, f"{prefix}mlp.up_proj", y))
    x = norm(config, weights, "model.norm", x)
    return x @ weights["model.embed_tokens.weight" if config["tie_word_embeddings"] else "lm_head.weight"].T


def attention(config: dict, weights: dict, prefix: str, x: torch.Tensor) -> torch.Tensor:
    dim, width = config["head_dim"], gate_width(config)
    groups = config["num_attention_heads"] // config["num_key_value_heads"]
    fused = linear(weights, f"{prefix}q_proj", x).chunk(config["num_key_value_heads"], dim=-1)
    keys, values = (linear(weights, f"{prefix}{name}_proj", x).split(dim, dim=-1) for name in "kv")
    future = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).triu(1)
    outputs = []
    for group, key, value in zip(fused, keys, values, strict=True):
        queries, gates = group.split([groups * dim, groups * width], dim=-1)
        key = rotate(config, normalize(config, weights, f"{prefix}k_norm", key))
        for head in range(groups):
            query = queries[..., head * dim : (head + 1) * dim]
            query = rotate(config, normalize(config, weights, f"{prefix}q_norm", query))
            scores = (query @ key.transpose(-1, -2) / dim**0.5).masked_fill(future, float("-inf"))
            read = scores.softmax(dim=-1) @ value
            gate = gates[..., head * width : (head + 1) * width]
            outputs.append(read * torch.sigmoid(gate) if width else read)
    return linear(weights, f"{prefix}o_proj", torch.cat(outputs, dim=-1))


def linear(weights: dict, name: str, x: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.linear(x, weights[f"{name}.weight"], weights.get(f"{name}.bias"))


def norm(config: dict, weights: dict, name: str, x: torch.Tensor) -> torch.Tensor:
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + config["rms_norm_eps"]) * weights[f"{name}.weight"]


def normalize(config: dict, weights: dict, name: str, x: torch.Tensor) -> torch.Tensor:
    return norm(config, weights, name, x) if config["use_qk_norm"] else x


def rotate(config: dict, x: torch.Tensor) -> torch.Tensor:
    half = config["head_dim"] // 2
    angles = torch.arange(x.shape[1])[:, None] * config["rope_theta"] ** (-torch.arange(half) / half)
    first, second = x.split(half, dim=-1)
    return torch.cat(
        [first * angles.cos() - second * angles.sin(), second * angles.cos() + first * angles.sin()], dim=-1
    )
