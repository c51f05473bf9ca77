"""Generation: caches, padding, beams, assistants and compilation give the tokens of the plain forward."""

import pytest
import torch
from torch._dynamo.testing import CompileCounter
from transformers import ContinuousBatchingConfig, DynamicCache, GenerationConfig, StaticCache


IDS = torch.randint(3, 96, (3, 12), generator=torch.Generator().manual_seed(1))
MASK = (torch.arange(12) >= torch.tensor([[0], [5], [11]])).long()
GREEDY = {"do_sample": False, "pad_token_id": 0, "eos_token_id": None}

GATES = {
    "none": {"gate_position": None},
    "G1 elementwise": {},
    "G1 headwise": {"gate_granularity": "headwise"},
    "G2 shared": {"gate_position": "G2", "gate_head_shared": True},
    "G3 constant": {"gate_position": "G3", "gate_input": "constant", "gate_activation": "ns_sigmoid"},
    "G4 additive": {"gate_position": "G4", "qk_norm": True, "gate_operation": "add", "gate_activation": "silu"},
    "G5 fp32": {"gate_position": "G5", "gate_in_fp32": True},
    "states": {"gate_input": "states"},
}
WINDOWS = {
    "full": {},
    "sliding": {"sliding_window": 8},
    "mixed": {"sliding_window": 8, "layer_types": ["full_attention", "sliding_attention", "sliding_attention"]},
}


@pytest.fixture
def gated(tiny_model):
    """`gated(name, window, **overrides)`: a model whose logits are far apart, so that rounding cannot swap tokens."""

    def make(name="G1 elementwise", window="full", **overrides):
        model = tiny_model(**{**GATES[name], **WINDOWS[window], "initializer_range": 0.3, **overrides})
        with torch.no_grad():
            for parameter_name, parameter in model.named_parameters():
                if ".self_attn.g_p" in parameter_name:
                    parameter.normal_(std=0.3)
        return model

    return make


def greedy_by_hand(model, ids, steps):
    """The definition: the whole sequence again for every token, without a cache."""
    for _ in range(steps):
        logits = model(ids, use_cache=False).logits[:, -1]
        ids = torch.cat([ids, logits.argmax(-1, keepdim=True)], dim=1)
    return ids


def make_cache(kind, model):
    return DynamicCache(config=model.config) if kind == "dynamic" else StaticCache(model.config, max_cache_len=32)


@pytest.mark.parametrize("kind", ["dynamic", "static"])
@pytest.mark.parametrize("window", WINDOWS)
@pytest.mark.parametrize("name", GATES)
@torch.no_grad()
def test_cached_logits_equal_uncached(name, window, kind, gated):
    """Prefill of 5, a chunk of 3, then single tokens, with rows that are left-padded by 0, 5 and 11 of 12 tokens."""
    model = gated(name, window)
    positions = (MASK.cumsum(1) - 1).clamp(min=0)
    full = model(IDS, attention_mask=MASK, position_ids=positions, use_cache=False).logits
    cache, pieces, start = make_cache(kind, model), [], 0
    for length in (5, 3, 1, 1, 1, 1):
        part = slice(start, start := start + length)
        inputs = {"attention_mask": MASK[:, :start], "position_ids": positions[:, part]}
        pieces.append(model(IDS[:, part], cache=cache, **inputs).logits)
    assert cache.get_seq_length() == 12
    # fp32 sums in another order, on logits of order 10; pads see nothing that is defined.
    torch.testing.assert_close(torch.cat(pieces, 1)[MASK.bool()], full[MASK.bool()], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("window", WINDOWS)
@pytest.mark.parametrize("name", GATES)
def test_generate_equals_greedy_by_hand(name, window, gated):
    """With the dynamic and the static cache, past the window."""
    model = gated(name, window)
    expected = greedy_by_hand(model, IDS[:1], 10)
    for cache in (None, "static"):
        found = model.generate(IDS[:1], max_new_tokens=10, cache_implementation=cache, disable_compile=True, **GREEDY)
        assert torch.equal(found, expected), cache


@pytest.mark.parametrize("window", WINDOWS)
def test_a_padded_batch_generates_what_each_row_does(window, gated):
    model = gated(window=window)
    batch = model.generate(IDS, attention_mask=MASK, max_new_tokens=10, **GREEDY)
    beams = model.generate(IDS, attention_mask=MASK, max_new_tokens=6, num_beams=3, **GREEDY)
    for row in range(3):
        alone = IDS[row : row + 1, 12 - MASK[row].sum() :]
        assert torch.equal(batch[row, 12:], model.generate(alone, max_new_tokens=10, **GREEDY)[0, alone.shape[1] :])
        beam = model.generate(alone, max_new_tokens=6, num_beams=3, **GREEDY)
        assert torch.equal(beams[row, 12:], beam[0, alone.shape[1] :])


@torch.no_grad()
def test_beams_are_at_least_as_likely_as_greedy(gated):
    model = gated()

    def likelihood(ids):
        scores = model(ids).logits.log_softmax(-1)[:, 11:-1]
        return scores.gather(2, ids[:, 12:, None]).sum()

    beam, greedy = (model.generate(IDS[:1], max_new_tokens=2, num_beams=n, **GREEDY) for n in (96, 1))
    assert likelihood(beam) >= likelihood(greedy)


@pytest.mark.parametrize("name", ["G1 elementwise", "G2 shared"])
def test_continuous_batching_generates_what_each_row_does(name, gated):
    """Requests of different lengths share one paged cache."""
    model, prompts = gated(name), [IDS[0, :9].tolist(), IDS[1, :4].tolist(), IDS[2].tolist()]
    settings = GenerationConfig(max_new_tokens=6, **GREEDY)
    pages = ContinuousBatchingConfig(num_blocks=16, max_batch_tokens=32)
    found = model.generate_batch(prompts, settings, pages)
    for prompt, output in zip(prompts, found.values(), strict=True):
        expected = greedy_by_hand(model, torch.tensor([prompt]), 6)
        assert output.generated_tokens == expected[0, len(prompt) :].tolist()


# Assistants: draft tokens are checked and rejected ones rolled back, also past the window.


def draft(gated, kind):
    if kind == "ungated":
        return gated("none", num_hidden_layers=1)
    return gated("G1 headwise", num_hidden_layers=2)


@pytest.mark.parametrize("window", ["full", "sliding", "mixed"])
@pytest.mark.parametrize("assistant", ["gated", "ungated", "prompt lookup", "itself"])
def test_assisted_decoding_equals_greedy(assistant, window, gated):
    """40 tokens with a window of 8."""
    model = gated(window=window)
    # A repetitive prompt gives the lookup something to find.
    prompt = torch.tensor([[5, 17, 33, 60, 5, 17, 33, 60, 5, 17]])
    options = {
        "gated": lambda: {"assistant_model": draft(gated, "gated")},
        "ungated": lambda: {"assistant_model": draft(gated, "ungated")},
        "prompt lookup": lambda: {"prompt_lookup_num_tokens": 4},
        "itself": lambda: {"assistant_model": model},
    }[assistant]()
    expected = model.generate(prompt, max_new_tokens=40, **GREEDY)
    assert torch.equal(model.generate(prompt, max_new_tokens=40, **GREEDY, **options), expected)


def test_a_gated_model_assists_an_ungated_one(gated):
    target, prompt = gated("none"), IDS[:1]
    expected = target.generate(prompt, max_new_tokens=20, **GREEDY)
    assert torch.equal(target.generate(prompt, max_new_tokens=20, assistant_model=gated(), **GREEDY), expected)


# The cache's two names.


@pytest.mark.parametrize("level", ["attention", "layer", "decoder", "causal model"])
@pytest.mark.filterwarnings("ignore:.*past_key_values.*:FutureWarning")  # what the library's own forward says of it
@torch.no_grad()
def test_both_names_of_the_cache(level, gated):
    """Transformers 5.24 says `cache`; before, and in engines built on it, it is `past_key_values`."""
    model = gated()
    states, ids = torch.randn(1, 3, model.config.hidden_size), IDS[:1, :3]
    rotary = model.model.rotary_emb(states, torch.arange(3)[None])
    call = {
        "attention": lambda **c: model.model.layers[0].self_attn(states, position_embeddings=rotary, **c)[0],
        "layer": lambda **c: model.model.layers[0](states, position_embeddings=rotary, **c),
        "decoder": lambda **c: model.model(ids, **c).last_hidden_state,
        "causal model": lambda **c: model(ids, **c).logits,
    }[level]
    outputs = []
    for name in ("cache", "past_key_values"):
        cache = DynamicCache(config=model.config)
        outputs.append(call(**{name: cache}))
        assert cache.get_seq_length() == 3
    assert torch.equal(*outputs)


# Compilation.


def compiled(model, backend):
    torch._dynamo.reset()
    return torch.compile(model, backend=backend, fullgraph=True, dynamic=False)


COMPILED = ["G1 elementwise", "G1 headwise", "G2 shared", "G5 fp32"]

# torch's compiler imports parts of torch that are deprecated.
compiler = pytest.mark.filterwarnings("ignore:.*torch.jit.script_method:DeprecationWarning")


@compiler
@pytest.mark.parametrize("name", COMPILED)
@torch.no_grad()
def test_one_graph(name, gated):
    """fullgraph: no break anywhere, and no second graph for a second call."""
    model = gated(name, "sliding", num_hidden_layers=2)
    expected = model(IDS, attention_mask=MASK).logits
    counter = CompileCounter()
    forward = compiled(model, counter)
    for _ in range(2):
        torch.testing.assert_close(forward(IDS, attention_mask=MASK).logits, expected, rtol=1e-4, atol=1e-4)
    assert counter.frame_count == 1


@compiler
def test_one_graph_with_gradients(gated):
    model = gated()
    model(IDS, labels=IDS).loss.backward()
    expected = {name: parameter.grad.clone() for name, parameter in model.named_parameters()}
    model.zero_grad()
    compiled(model, "eager")(IDS, labels=IDS).loss.backward()
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter.grad, expected[name], rtol=1e-4, atol=1e-5)


@compiler
@torch.no_grad()
def test_static_decoding_compiles_once(gated):
    """One graph for decoding, whatever the prompt's length and the position."""
    model = gated(window="full")
    counter = CompileCounter()
    step = compiled(model, counter)
    for length in (3, 5, 8):
        cache = StaticCache(model.config, max_cache_len=16)
        prompt = IDS[:1, :length]
        token = model(prompt, cache=cache).logits[:, -1:].argmax(-1)
        found = [prompt, token]
        for position in range(length, length + 4):
            logits = step(token, cache=cache, position_ids=torch.tensor([[position]])).logits
            found.append(token := logits[:, -1:].argmax(-1))
        assert torch.equal(torch.cat(found, 1), greedy_by_hand(model, prompt, 5))
    assert counter.frame_count == 1


@pytest.mark.slow
@compiler
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of torch's own inductor
@pytest.mark.parametrize("name", COMPILED)
def test_inductor_generates_the_same(name, gated):
    """`generate` with a static cache compiles the decoding step with inductor."""
    model = gated(name)
    for length in (3, 6, 9):
        expected = greedy_by_hand(model, IDS[:1, :length], 6)
        found = model.generate(IDS[:1, :length], max_new_tokens=6, cache_implementation="static", **GREEDY)
        assert torch.equal(found, expected)
    expected = model(IDS, labels=IDS)
    found = compiled(model, "inductor")(IDS, labels=IDS)
    torch.testing.assert_close(found.logits, expected.logits, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(
        *(torch.autograd.grad(output.loss, model.lm_head.weight) for output in (found, expected))
    )
