"""The gated decoder straight from its equations: plain loops over layers, tokens and heads, no code of the library.

`decoder_logits` is what `GatedLlamaForCausalLM` must compute. It reads a configuration and a state dict, works in the
dtype of the weights and is differentiable. Notation: x a pre-normed hidden state, h a query head, r(h) its key group,
d the head width; a state is a list of vectors, one for each head of one token.
"""

import math

import torch


def sigmoid(u):
    """1 / (1 + exp(-u))."""
    return 1 / (1 + torch.exp(-u))


ACTIVATIONS = {
    "sigmoid": sigmoid,
    "silu": lambda u: u * sigmoid(u),
    "identity": lambda u: u,
    "ns_sigmoid": lambda u: 0.5 + 0.5 * sigmoid(u),
}


def rms_norm(x, weight, eps):
    """x / sqrt(mean(x^2) + eps) * weight."""
    return x / torch.sqrt((x * x).mean() + eps) * weight


def linear(weights, name, x):
    """W x (+ b) for one vector."""
    y = weights[f"{name}.weight"] @ x
    bias = weights.get(f"{name}.bias")
    return y if bias is None else y + bias


def heads_of(x, width):
    """One vector cut into heads of `width` coordinates."""
    return [x[start : start + width] for start in range(0, len(x), width)]


def rotate(x, position, inv_freq, scaling):
    """Rotates coordinate pairs (i, i + r/2) of the first r = 2 len(inv_freq) coordinates by position * inv_freq_i."""
    half = len(inv_freq)
    angle = position * inv_freq
    cos, sin = (torch.cos(angle) * scaling).to(x.dtype), (torch.sin(angle) * scaling).to(x.dtype)
    first, second, rest = x[:half], x[half : 2 * half], x[2 * half :]
    return torch.cat([first * cos - second * sin, second * cos + first * sin, rest])


def gate_logits(config, weights, name, states, x):
    """The gate's logits for one token, one vector for each head of `states`."""
    if config.gate_input == "states":
        return states
    if config.gate_input == "constant":
        return list(weights[f"{name}.g_param"])
    width = 1 if config.gate_granularity == "headwise" else len(states[0])
    if config.gate_in_fp32:
        weights = {key: tensor.float() for key, tensor in weights.items() if key.startswith(f"{name}.g_proj")}
        x = x.float()
    return heads_of(linear(weights, f"{name}.g_proj", x), width)


def gate(config, weights, layer, position, states, x):
    """y * act(u) or y + act(u) for each head y of one token; `states` as they are away from the gated position."""
    gated_layers = range(config.num_hidden_layers) if config.gate_layers is None else config.gate_layers
    if position != config.gate_position or layer not in gated_layers:
        return states
    logits = gate_logits(config, weights, f"model.layers.{layer}.self_attn", states, x)
    if config.gate_in_fp32:
        logits = [u.float() for u in logits]
    if config.gate_head_shared:
        logits = [sum(logits) / len(logits)] * len(logits)
    scores = [ACTIVATIONS[config.gate_activation](u) for u in logits]
    if config.gate_operation == "multiply":
        return [(y * score).to(y.dtype) for y, score in zip(states, scores, strict=True)]
    return [(y + score).to(y.dtype) for y, score in zip(states, scores, strict=True)]


def read(query, keys, values):
    """sum_j softmax_j(query k_j / sqrt(d)) v_j over lists of visible keys and values."""
    scores = torch.stack(keys) @ query / math.sqrt(len(query))
    weights = torch.exp(scores - scores.max())
    return weights / weights.sum() @ torch.stack(values)


def attention(config, weights, layer, xs, positions, inv_freq, scaling):
    """The attention branch of one sequence, whose pre-normed hidden states are `xs`: one vector for each token."""
    name, width, eps = f"model.layers.{layer}.self_attn", config.head_dim, config.rms_norm_eps
    window = config.sliding_window if config.layer_types[layer] == "sliding_attention" else math.inf
    group = config.num_attention_heads // config.num_key_value_heads

    def projected(kind, gated, x):
        states = heads_of(linear(weights, f"{name}.{kind}_proj", x), width)
        return gate(config, weights, layer, gated, states, x)

    def prepared(kind, gated, x, position):
        states = projected(kind, gated, x)
        if config.qk_norm:
            states = [rms_norm(state, weights[f"{name}.{kind}_norm.weight"], eps) for state in states]
        return [rotate(state, position, inv_freq, scaling) for state in states]

    queries = [prepared("q", "query", x, position) for x, position in zip(xs, positions, strict=True)]
    keys = [prepared("k", "key", x, position) for x, position in zip(xs, positions, strict=True)]
    values = [projected("v", "value", x) for x in xs]

    outputs = []
    for i, x in enumerate(xs):
        visible = [j for j in range(i + 1) if i - j < window]
        states = []
        for head in range(config.num_attention_heads):
            shared = head // group
            states.append(
                read(queries[i][head], [keys[j][shared] for j in visible], [values[j][shared] for j in visible])
            )
        if config.sdpa_output_norm:
            states = [rms_norm(state, weights[f"{name}.sdpa_norm.weight"], eps) for state in states]
        states = gate(config, weights, layer, "sdpa_output", states, x)
        dense = linear(weights, f"{name}.o_proj", torch.cat(states))
        outputs += gate(config, weights, layer, "dense_output", [dense], x)
    return outputs


def mlp(weights, name, x):
    """W_down (silu(W_gate x) * W_up x)."""
    activated = ACTIVATIONS["silu"](linear(weights, f"{name}.gate_proj", x))
    return linear(weights, f"{name}.down_proj", activated * linear(weights, f"{name}.up_proj", x))


def decoder_logits(config, weights, tokens, inv_freq, scaling=1.0, positions=None):
    """
    Logits [tokens, vocabulary] of one sequence.

    `weights` is the state dict of a GatedLlamaForCausalLM; `inv_freq` and `scaling` are the rotary frequencies and the
    factor on cosine and sine; `positions` default to 0, 1, 2, ...
    """
    positions = range(len(tokens)) if positions is None else positions
    eps, hidden = config.rms_norm_eps, [weights["model.embed_tokens.weight"][token] for token in tokens]
    for layer in range(config.num_hidden_layers):
        name = f"model.layers.{layer}"
        xs = [rms_norm(h, weights[f"{name}.input_layernorm.weight"], eps) for h in hidden]
        branch = attention(config, weights, layer, xs, positions, inv_freq, scaling)
        hidden = [h + y for h, y in zip(hidden, branch, strict=True)]
        xs = [rms_norm(h, weights[f"{name}.post_attention_layernorm.weight"], eps) for h in hidden]
        hidden = [h + mlp(weights, f"{name}.mlp", x) for h, x in zip(hidden, xs, strict=True)]
    head = weights["model.embed_tokens.weight"] if config.tie_word_embeddings else weights["lm_head.weight"]
    return torch.stack([head @ rms_norm(h, weights["model.norm.weight"], eps) for h in hidden])
