"""Verification: equal models are bitwise equal, and each injected fault is found where it was made."""

import json
import math
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    GenerationConfig,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
)

from gated_llama.convert import convert_checkpoint
from gated_llama.convert import verify as verify_module
from gated_llama.convert.verify import verify, verify_dtypes
from gated_llama.diagnostics.divergence import first_divergence, layer_divergence, place_name, recorded_states
from gated_llama_cli import main
from gated_llama_cli.demo import find_smollm2


STORIES = Path(__file__).parent / "data" / "stories260K"
TINY = {
    "vocab_size": 300,
    "hidden_size": 40,
    "intermediate_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 128,
    "initializer_range": 0.2,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
PLACES = ["embed_tokens", 0, 1, 2, "norm", "logits"]


def llama(**overrides) -> LlamaForCausalLM:
    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(**{**TINY, **overrides})).eval()


@pytest.fixture
def source(tmp_path):
    llama().save_pretrained(tmp_path / "source")
    return tmp_path / "source"


def byte_tokenizer(*steps) -> PreTrainedTokenizerFast:
    """One token for each byte, after the normalizers given."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({symbol: index for index, symbol in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    if steps:
        tokenizer.normalizer = normalizers.Sequence(list(steps))
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer)


def test_a_checkpoint_equals_itself(source):
    report = verify(source, source, tokens=16, batch=2)
    assert report.bitwise
    assert report.greedy_equal
    assert report.passes()
    assert report.max_abs_difference == 0
    assert report.first_diverging_layer is None
    assert (report.dtype, report.tokens) == ("float32", 32)
    assert [layer.place for layer in report.layers] == PLACES
    assert report.ids_equal is None
    assert "random" in report.ids


@pytest.mark.parametrize("place", PLACES)
def test_a_wrong_weight_is_found_where_it_is(source, tmp_path, place):
    model = llama()
    weights = {"embed_tokens": model.model.embed_tokens, "norm": model.model.norm, "logits": model.lm_head}
    module = weights[place] if place in weights else model.model.layers[place].mlp.down_proj
    with torch.no_grad():
        module.weight.mul_(1.01)
    model.save_pretrained(tmp_path / "result")

    report = verify(source, tmp_path / "result")
    assert report.first_diverging_layer == place
    assert not report.bitwise
    assert not report.passes()
    assert report.max_abs_difference > 0
    at = PLACES.index(place)
    assert all(layer.bitwise and layer.max_abs_difference == 0 for layer in report.layers[:at])
    assert report.layers[at].max_abs_difference > 0


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_identity_is_proven_and_other_starts_are_not(source, tmp_path, dtype, randomize_gates):
    convert_checkpoint(source, tmp_path / "identity")
    convert_checkpoint(source, tmp_path / "normal", policy="normal", layers=[1, 2])
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "identity")
    randomize_gates(model).save_pretrained(tmp_path / "random")

    assert verify(source, tmp_path / "identity", dtype=dtype).passes()
    assert verify(source, tmp_path / "normal", dtype=dtype).first_diverging_layer == 1
    random = verify(source, tmp_path / "random", dtype=dtype)
    assert random.first_diverging_layer == 0
    assert not random.passes()


def test_tolerance_is_on_the_logits(source, tmp_path):
    model = llama()
    with torch.no_grad():
        model.lm_head.weight.add_(1e-6)
    model.save_pretrained(tmp_path / "result")
    report = verify(source, tmp_path / "result")
    assert not report.passes()
    assert report.passes(tolerance=report.max_abs_difference)
    assert not report.passes(tolerance=report.max_abs_difference / 2)


def test_the_last_token_counts(source, tmp_path):
    """A row of the embedding that only the last token reads changes the logits there and nowhere else."""
    ids = torch.randint(TINY["vocab_size"], (1, 8), generator=torch.Generator().manual_seed(0))[0]
    assert ids[-1] not in ids[:-1]
    model = llama()
    with torch.no_grad():
        model.model.embed_tokens.weight[ids[-1]] += 1
    model.save_pretrained(tmp_path / "result")
    report = verify(source, tmp_path / "result", tokens=8)
    assert report.max_abs_difference > 0.1
    assert not report.passes(tolerance=1e-3)


def test_greedy_decoding_is_part_of_the_proof(source, tmp_path):
    model = llama()
    # Every token ends the text: the source goes on for eight.
    model.generation_config = GenerationConfig(bos_token_id=1, eos_token_id=list(range(TINY["vocab_size"])))
    model.save_pretrained(tmp_path / "result")
    report = verify(source, tmp_path / "result")
    assert report.bitwise
    assert not report.greedy_equal
    assert not report.passes()


def test_each_dtype_once(source, tmp_path):
    llama().bfloat16().save_pretrained(tmp_path / "result")
    reports = verify_dtypes(source, tmp_path / "result", ["float32", "file", "bfloat16"])
    assert [report.dtype for report in reports] == ["float32", "bfloat16"]
    # The source's weights rounded to bfloat16 are the result's; in float32 the rounding shows.
    assert [report.bitwise for report in reports] == [False, True]
    assert verify(source, tmp_path / "result", dtype="file").dtype == "bfloat16"  # of the result


@pytest.mark.parametrize("unequal", [0, 1])
def test_one_unequal_dtype_is_a_no(source, unequal, monkeypatch, capsys):
    """Whichever it is; the numbers at the top are those of the one that is off."""
    reports = verify_dtypes(source, source, ["float32", "bfloat16"], tokens=4)
    assert all(report.passes() for report in reports)
    reports[unequal] = replace(reports[unequal], bitwise=False, first_diverging_layer=1, max_abs_difference=1e-3)
    monkeypatch.setattr("gated_llama.convert.verify.verify_dtypes", lambda *args, **options: reports)
    assert main(["verify", str(source), str(source)]) == 1
    capsys.readouterr()
    assert main(["verify", str(source), str(source), "--json"]) == 1
    found = json.loads(capsys.readouterr().out)
    assert (found["equal"], found["bitwise"]) == (False, False)
    assert found["dtype"] == reports[unequal].dtype
    assert main(["verify", str(source), str(source), "--tolerance", "1e-4"]) == 1
    assert main(["verify", str(source), str(source), "--tolerance", "1e-2"]) == 0


@pytest.mark.parametrize("attn_implementation", ["sdpa", "eager"])
def test_backends(source, tmp_path, attn_implementation):
    convert_checkpoint(source, tmp_path / "result", granularity="elementwise")
    report = verify(source, tmp_path / "result", attn_implementation=attn_implementation)
    assert report.attn_implementation == attn_implementation
    assert report.passes()


def test_token_ids_are_compared(source, tmp_path):
    byte_tokenizer().save_pretrained(source)
    convert_checkpoint(source, tmp_path / "result")
    report = verify(source, tmp_path / "result", tokens=80)
    assert report.ids == "the source's tokenizer"
    assert report.ids_equal is True
    assert report.passes()

    byte_tokenizer(normalizers.Lowercase()).save_pretrained(tmp_path / "result")
    report = verify(source, tmp_path / "result")
    assert report.bitwise
    assert report.ids_equal is False
    assert not report.passes()
    assert not report.passes(tolerance=1.0)


def test_a_result_without_tokenizer_is_not_the_same(source, tmp_path):
    convert_checkpoint(source, tmp_path / "result")
    byte_tokenizer().save_pretrained(source)
    assert verify(source, tmp_path / "result").ids_equal is False


def test_tokenizer_json_counts_where_a_class_overrules_it(tmp_path):
    """SmolLM's case: under type llama the class named GPT2Tokenizer drops what the file does before splitting."""
    llama().save_pretrained(tmp_path / "source")
    byte_tokenizer(normalizers.Lowercase()).save_pretrained(tmp_path / "source")
    path = tmp_path / "source" / "tokenizer_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"tokenizer_class": "GPT2Tokenizer"}))
    convert_checkpoint(tmp_path / "source", tmp_path / "result")
    report = verify(tmp_path / "source", tmp_path / "result")
    assert report.ids_equal is True
    assert "tokenizer.json" in report.ids


@pytest.mark.parametrize("template", ["$A", "<s> $A </s>"])
def test_other_special_tokens_are_told(tmp_path, template):
    """Also for a source whose class overrules its file."""
    convert_checkpoint(STORIES, tmp_path / "result")
    assert verify(STORIES, tmp_path / "result").ids_equal is True
    path = tmp_path / "result" / "tokenizer.json"
    special = [("<s>", 1), ("</s>", 2)]
    rules = Tokenizer.from_file(str(path))
    rules.post_processor = processors.TemplateProcessing(single=template, special_tokens=special)
    rules.save(str(path))
    report = verify(STORIES, tmp_path / "result")
    assert report.bitwise
    assert report.ids_equal is False
    assert report.ids == "the source's tokenizer"


def test_a_damaged_tokenizer_is_named(source):
    (source / "tokenizer.json").write_text("{}")
    with pytest.raises(ValueError, match=r"tokenizer of .*source cannot be loaded"):
        verify(source, source)


def test_text_repeats_until_the_rows_are_full(source):
    byte_tokenizer().save_pretrained(source)
    assert verify(source, source, text="ab", tokens=5, batch=3).tokens == 15
    with pytest.raises(ValueError, match="no tokens"):
        verify(source, source, text="")


def test_ids_beyond_the_embeddings_are_refused(tmp_path):
    tokenizer = byte_tokenizer()
    largest = tokenizer.convert_tokens_to_ids("z")
    llama(vocab_size=largest).save_pretrained(tmp_path / "source")
    tokenizer.save_pretrained(tmp_path / "source")
    with pytest.raises(ValueError, match=f"gives id {largest}, but the model has {largest} embeddings"):
        verify(tmp_path / "source", tmp_path / "source", text="z")
    assert verify(tmp_path / "source", tmp_path / "source", text="y", tokens=4).passes()


@pytest.mark.parametrize("position", [0, 7])
def test_the_logits_of_every_token_are_compared(source, position, monkeypatch):
    """The first and the last, where nothing else of the model differs."""
    run, calls = verify_module._run, []

    def spoiled(model, ids):
        def spoil(module, inputs, output):
            output.logits[:, position, 5] += 1

        calls.append(model)
        handle = model.register_forward_hook(spoil) if len(calls) == 2 else None
        monkeypatch.setattr(model, "generate", lambda ids, **options: ids)  # which runs the hooked model as well
        states, greedy = run(model, ids)
        if handle:
            handle.remove()
        return states, greedy

    monkeypatch.setattr(verify_module, "_run", spoiled)
    report = verify(source, source, tokens=8)
    assert report.first_diverging_layer == "logits"
    assert report.max_abs_difference == pytest.approx(1, abs=1e-5)
    assert report.greedy_equal
    assert not report.passes()


def test_absent_and_misshapen_weights_are_never_invented(source, tmp_path):
    from safetensors.torch import load_file, save_file

    convert_checkpoint(source, tmp_path / "result")
    path = tmp_path / "result" / "model.safetensors"
    tensors = load_file(path)
    dropped = tensors.pop("model.layers.1.mlp.up_proj.weight")
    save_file(tensors, path, metadata={"format": "pt"})
    with pytest.raises(ValueError, match=r"result has no weights for .*: 1 tensors, the first 'model\.layers\.1\.mlp"):
        verify(source, tmp_path / "result")

    save_file(tensors | {"model.layers.1.mlp.up_proj.weight": dropped[:-1].clone()}, path, metadata={"format": "pt"})
    with pytest.raises(ValueError, match="do not have the shapes"):
        verify(source, tmp_path / "result")


def test_models_of_another_shape_are_refused(source, tmp_path):
    llama(num_hidden_layers=2).save_pretrained(tmp_path / "shallow")
    llama(hidden_size=48).save_pretrained(tmp_path / "wide")
    with pytest.raises(ValueError, match="6 and 5 layers"):
        verify(source, tmp_path / "shallow")
    with pytest.raises(ValueError, match=r"At embed_tokens .* 40\] and .* 48\]"):
        verify(source, tmp_path / "wide")


def test_values_that_are_not_finite(source, tmp_path):
    model = llama()
    with torch.no_grad():
        model.model.layers[1].mlp.down_proj.weight.fill_(1e38)
    model.save_pretrained(tmp_path / "result")

    report = verify(source, tmp_path / "result")
    assert report.first_diverging_layer == 1
    assert report.max_abs_difference == math.inf
    assert not report.passes(tolerance=1e300)
    assert json.loads(json.dumps(report.to_dict(), allow_nan=False))["max_abs_difference"] is None
    with pytest.raises(ValueError, match=r"not finite at model\.layers\.1 in float32"):
        verify(tmp_path / "result", tmp_path / "result")


@pytest.mark.parametrize(
    ("options", "message"),
    [({"dtype": "int8"}, "int8"), ({"tokens": 0}, "tokens=0"), ({"batch": -1}, "batch=-1")],
)
def test_bad_requests(source, options, message):
    with pytest.raises(ValueError, match=message):
        verify(source, source, **options)


def test_bad_places(source, tmp_path):
    with pytest.raises(ValueError, match="does not exist"):
        verify(source, tmp_path / "nothing")
    with pytest.raises(ValueError, match=r"no config\.json"):
        verify(tmp_path, source)


def test_decoders_of_another_build_are_refused(tmp_path):
    GPT2LMHeadModel(GPT2Config(vocab_size=96, n_embd=16, n_layer=1, n_head=2)).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="GPT2LMHeadModel has no decoder"):
        verify(tmp_path, tmp_path)


def test_divergence_counts_bits():
    zero, minus_zero = {"norm": torch.zeros(2)}, {"norm": -torch.zeros(2)}
    (difference,) = layer_divergence(zero, minus_zero)
    assert difference.max_abs_difference == 0
    assert not difference.bitwise
    assert first_divergence([difference]) == "norm"
    assert first_divergence(layer_divergence(zero, zero)) is None
    (difference,) = layer_divergence({3: torch.ones(2)}, {3: torch.tensor([1.0, torch.nan])})
    assert difference.max_abs_difference == math.inf
    assert place_name(difference.place) == "model.layers.3"
    with pytest.raises(ValueError, match=r"At model\.layers\.0"):
        layer_divergence({0: torch.zeros(2)}, {0: torch.zeros(3)})


def test_recording_equals_the_librarys_and_leaves_no_trace():
    model = llama()
    ids = torch.arange(3, 11).unsqueeze(0)
    with recorded_states(model) as states:
        output = model(ids, output_hidden_states=True)
    assert list(states) == PLACES[:-1]
    for place, expected in zip(["embed_tokens", 0, 1, "norm"], output.hidden_states, strict=True):
        assert torch.equal(states[place], expected)
    assert torch.equal(model.model.norm(states[2]), states["norm"])

    def hooks() -> int:  # the library keeps hooks of its own after a forward with output_hidden_states
        return sum(len(module._forward_hooks) for module in model.modules())

    before = hooks()
    with pytest.raises(IndexError), recorded_states(model):
        model(torch.tensor([[TINY["vocab_size"]]]))
    assert hooks() == before


REAL_CELLS = {
    "G1 headwise": {"position": "G1"},
    "G1 elementwise": {"position": "G1", "granularity": "elementwise"},
    "G1 shared": {"position": "G1", "granularity": "elementwise", "head_shared": True},
    "G2 headwise": {"position": "G2"},
    "G2 elementwise": {"position": "G2", "granularity": "elementwise"},
    "G5": {"position": "G5", "granularity": "elementwise"},
    "additive SiLU": {"granularity": "elementwise", "operation": "add", "activation": "silu"},
    "additive identity": {"granularity": "elementwise", "operation": "add", "activation": "identity"},
}


@pytest.fixture(scope="module")
def smollm2(tmp_path_factory):
    """SmolLM2-135M-Instruct, de-quantised once into a plain llama folder with its tokenizer."""
    file = Path(find_smollm2())
    folder = tmp_path_factory.mktemp("smollm2") / "plain"
    loaded = LlamaForCausalLM.from_pretrained(file.parent, gguf_file=file.name)
    # A model that came from GGUF refuses to be saved, and its config carries notes from the file.
    known = LlamaConfig().to_dict()
    config = {name: value for name, value in loaded.config.to_dict().items() if name in known}
    model = LlamaForCausalLM(LlamaConfig(**config))
    model.load_state_dict(loaded.state_dict())
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name).save_pretrained(folder)
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("cell", REAL_CELLS)
def test_the_identity_of_a_real_model_is_bitwise(smollm2, tmp_path, cell):
    convert_checkpoint(smollm2, tmp_path / "result", **REAL_CELLS[cell])
    reports = verify_dtypes(smollm2, tmp_path / "result", ["float32", "bfloat16"])
    assert [report.dtype for report in reports] == ["float32", "bfloat16"]
    for report in reports:
        assert report.bitwise, report.first_diverging_layer
        assert report.greedy_equal
        assert report.ids_equal
    shutil.rmtree(tmp_path / "result")
