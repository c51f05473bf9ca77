"""Folders carry their code: every way of saving, a process without the package, and who wins when both are there."""

import ast
import importlib
import inspect
import json
import logging
import os
import shutil
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import torch
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, Trainer, TrainingArguments
from transformers.dynamic_module_utils import get_class_from_dynamic_module
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

import gated_llama
from gated_llama import (
    GatedLlamaConfig,
    GatedLlamaForCausalLM,
    GatedLlamaForQuestionAnswering,
    GatedLlamaForSequenceClassification,
    GatedLlamaForTokenClassification,
    GatedLlamaModel,
    gate_override,
)
from gated_llama.configuration_gated import AUTO_MAP, OWN_FILES
from gated_llama.modeling_gated import GatedLlamaAttention


IDS = torch.tensor([[5, 17, 33, 2, 60, 41]])
CODE = tuple(f"{name}.py" for name in OWN_FILES)

# What loads each saved class again.
HEADS = {
    "AutoModel": GatedLlamaModel,
    "AutoModelForCausalLM": GatedLlamaForCausalLM,
    "AutoModelForSequenceClassification": GatedLlamaForSequenceClassification,
    "AutoModelForTokenClassification": GatedLlamaForTokenClassification,
    "AutoModelForQuestionAnswering": GatedLlamaForQuestionAnswering,
}

# Other gates, and other ways of writing a folder.
CAUSAL = {
    "constant": {"gate_input": "constant", "gate_position": "G2"},
    "fp32": {"gate_in_fp32": True, "gate_granularity": "headwise", "gate_layers": [0, 2]},
    "tied": {"tie_word_embeddings": True, "gate_position": "G5", "sliding_window": 3},
    "sharded": {},
    "trainer": {},
    "reloaded": {},
}


def filled(head, **overrides):
    torch.manual_seed(0)
    config = GatedLlamaConfig(
        vocab_size=96,
        hidden_size=40,
        intermediate_size=64,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        pad_token_id=0,
        **{"gate_position": "G1", **overrides},
    )
    model = head(config).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if ".self_attn.g_p" in name:
                parameter.normal_(std=0.5)
    return model


def trainer_checkpoint(model, folder):
    arguments = TrainingArguments(
        str(folder), use_cpu=True, report_to=[], disable_tqdm=True, max_steps=1, save_steps=1
    )
    data = [{"input_ids": IDS[0], "labels": IDS[0]}] * 4
    Trainer(model=model, args=arguments, train_dataset=data).train()
    model.eval()
    return folder / "checkpoint-1"


def with_offset(source, folder, offset):
    """A copy whose modelling code adds `offset` to the logits."""
    shutil.copytree(source, folder)
    file = folder / "modeling_gated.py"
    code = f"""

class ShiftedHead(nn.Linear):
    def forward(self, hidden_states):
        return super().forward(hidden_states) + {offset}


def shifted(self, config, original=GatedLlamaForCausalLM.__init__):
    original(self, config)
    self.lm_head.__class__ = ShiftedHead


GatedLlamaForCausalLM.__init__ = shifted
"""
    file.write_text(file.read_text() + code)
    return folder


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A folder for each class and way of saving; the models that they were saved from."""
    root, models = tmp_path_factory.mktemp("hub"), {}
    for auto_class, head in HEADS.items():
        models[auto_class] = filled(head)
        models[auto_class].save_pretrained(root / auto_class)
    for kind, overrides in CAUSAL.items():
        name = f"AutoModelForCausalLM-{kind}"
        model = filled(GatedLlamaForCausalLM, **overrides)
        if kind == "sharded":
            model.save_pretrained(root / name, max_shard_size="40KB")
        elif kind == "trainer":
            trainer_checkpoint(model, root / "run").rename(root / name)
        elif kind == "reloaded":
            model.save_pretrained(root / "run" / name)
            model = AutoModelForCausalLM.from_pretrained(root / "run" / name).eval()
            model.save_pretrained(root / name)
        else:
            model.save_pretrained(root / name)
        models[name] = model
    for name, offset in {"edited/1": 1, "edited/2": 2, "twin/2": 3}.items():
        with_offset(root / "AutoModelForCausalLM", root / name, offset)
    torch.save(IDS, root / "ids.pt")
    return root, models


def clean_environment(folder):
    return {**os.environ, "HF_HUB_OFFLINE": "1", "HF_HOME": str(folder / "home"), "PYTHONPATH": ""}


@pytest.fixture(scope="module")
def clean_process(saved):
    """What the process without the package found in those folders."""
    root, _ = saved
    script = Path(__file__).with_name("hub_clean_process.py")
    result = subprocess.run(
        [sys.executable, script, root],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        cwd=root,
        env=clean_environment(root),
        timeout=300,
    )
    assert result.returncode == 0, result.stderr
    return {"warnings": result.stderr, **torch.load(root / "results.pt")}


NAMES = [*HEADS, *(f"AutoModelForCausalLM-{kind}" for kind in CAUSAL)]


def assert_self_contained(folder):
    package = Path(gated_llama.__file__).parent
    for name in CODE:
        assert (folder / name).read_text() == (package / name).read_text(), name
    assert json.loads((folder / "config.json").read_text())["auto_map"] == AUTO_MAP


def test_the_map_names_every_head():
    assert set(AUTO_MAP) == {"AutoConfig", *HEADS}
    for auto_class, head in HEADS.items():
        assert AUTO_MAP[auto_class] == f"modeling_gated.{head.__name__}"


@pytest.mark.parametrize("name", NAMES)
def test_every_save_is_self_contained(name, saved):
    assert_self_contained(saved[0] / name)


def of(output):
    return next(getattr(output, key) for key in ("logits", "start_logits", "last_hidden_state") if key in output)


@pytest.mark.parametrize("name", NAMES)
def test_a_clean_process_loads_it_as_remote_code(name, saved, clean_process):
    """Equal outputs and gate scores, from a thread without a terminal; the second generation is as complete."""
    root, models = saved
    found = clean_process[name]
    assert "error" not in found, found
    assert all(module.startswith("transformers_modules.") for module in found["modules"])
    expected = of(models[name](IDS))
    assert torch.equal(found["first"], expected)
    assert torch.equal(found["second"], expected)
    decoder = models[name] if name == "AutoModel" else models[name].model
    scores = decoder(IDS, output_gate_scores=True).gate_scores
    assert len(scores) == len(decoder.config.gated_layers)
    assert all(torch.equal(a, b) for a, b in zip(found["scores"], scores, strict=True))
    assert_self_contained(root / "again" / name)


def test_the_package_reads_the_second_generation(saved, clean_process, tmp_path):
    """And writes a third one."""
    root, models = saved
    model = AutoModelForCausalLM.from_pretrained(root / "again" / "AutoModelForCausalLM").eval()
    assert type(model) is GatedLlamaForCausalLM
    assert torch.equal(model(IDS).logits, models["AutoModelForCausalLM"](IDS).logits)
    model.save_pretrained(tmp_path)
    assert_self_contained(tmp_path)


# The package and the folder's code in one process.


@pytest.mark.parametrize("trust", [False, True])
def test_the_package_wins_over_the_folder_and_says_so(trust, saved, caplog, monkeypatch):
    """Where the package is imported its classes load every folder, and warn when the folder's code is another."""
    root, models = saved
    folder = root / "edited" / "1"
    monkeypatch.setattr(logging.getLogger("transformers"), "propagate", True)
    for source, warns in ((root / "AutoModelForCausalLM", False), (folder, True)):
        caplog.clear()
        model = AutoModelForCausalLM.from_pretrained(source, trust_remote_code=trust).eval()
        assert type(model) is GatedLlamaForCausalLM
        assert torch.equal(model(IDS).logits, models["AutoModelForCausalLM"](IDS).logits)
        assert (f"{folder} carries a modeling_gated.py that differs" in caplog.text) == warns


def test_other_configuration_code_is_told_too(saved, tmp_path, caplog, monkeypatch):
    monkeypatch.setattr(logging.getLogger("transformers"), "propagate", True)
    folder = shutil.copytree(saved[0] / "AutoModelForCausalLM", tmp_path / "model")
    with open(folder / "configuration_gated.py", "a") as file:
        file.write("\n# changed\n")
    AutoModelForCausalLM.from_pretrained(folder)
    assert f"{folder} carries a configuration_gated.py that differs" in caplog.text


def test_a_token_classifier_with_a_null_for_dropout(tiny_config):
    for given, expected in ((None, 0.1), (0.25, 0.25)):
        config = tiny_config(classifier_dropout=given)
        assert GatedLlamaForTokenClassification(config).dropout.p == expected


def test_folders_keep_their_code(saved, clean_process):
    """Without the package, in one process, in turn; what remote code saves is that code."""
    root, models = saved
    plain = models["AutoModelForCausalLM"](IDS).logits
    for found, offset in zip(clean_process["edited"][:4], (1, 2, 1, 2), strict=True):
        torch.testing.assert_close(found, plain + offset)
    for name in ("edited/1", "edited/2"):
        assert (root / "again" / name / "modeling_gated.py").read_text() == (
            root / name / "modeling_gated.py"
        ).read_text()


def test_a_folder_that_is_loaded_by_other_code_says_so(saved, clean_process):
    """Transformers takes a second folder of the same name and config code for the first one."""
    root, models = saved
    found = clean_process["edited"][4]
    torch.testing.assert_close(found, models["AutoModelForCausalLM"](IDS).logits + 2)
    assert clean_process["warnings"].count("carries a modeling_gated.py that differs") == 1
    assert f"{root / 'twin/2'} carries a modeling_gated.py that differs" in clean_process["warnings"]


def test_the_base_model_of_a_causal_folder(saved):
    """Engines build the decoder through AutoModel from the folder of a causal model."""
    root, models = saved
    base = AutoModel.from_pretrained(root / "AutoModelForCausalLM").eval()
    expected = models["AutoModelForCausalLM"].model(IDS).last_hidden_state
    assert torch.equal(base(IDS).last_hidden_state, expected)


def test_override_recognises_remote_code(saved):
    folder = saved[0] / "AutoModelForCausalLM"
    remote_class = get_class_from_dynamic_module(AUTO_MAP["AutoModelForCausalLM"], folder)
    remote = remote_class.from_pretrained(folder).eval()
    assert not isinstance(remote, GatedLlamaForCausalLM)
    with gate_override(remote, 1.0), gate_override(saved[1]["AutoModelForCausalLM"], 1.0):
        assert torch.equal(remote(IDS).logits, saved[1]["AutoModelForCausalLM"](IDS).logits)


def test_importing_twice_is_harmless(saved):
    importlib.reload(gated_llama)
    assert AutoConfig.for_model("gated_llama").model_type == "gated_llama"
    AutoModelForCausalLM.from_pretrained(saved[0] / "AutoModelForCausalLM")


ORDERS = """
import sys, transformers
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig

remote = AutoModelForCausalLM.from_pretrained(sys.argv[1], trust_remote_code=True)
import gated_llama
local = AutoModelForCausalLM.from_pretrained(sys.argv[1])
assert type(remote).__module__.startswith("transformers_modules.")
assert type(local) is gated_llama.GatedLlamaForCausalLM, type(local)
assert type(AutoModelForCausalLM.from_pretrained(sys.argv[1], trust_remote_code=True)) is type(local)

for name in [name for name in sys.modules if name.startswith("gated_llama")]:
    del sys.modules[name]
import gated_llama as second
assert type(AutoModelForCausalLM.from_pretrained(sys.argv[1])) is second.GatedLlamaForCausalLM


class ForeignConfig(PreTrainedConfig):
    model_type = "gated_llama"


AutoConfig.register("gated_llama", ForeignConfig, exist_ok=True)
for name in [name for name in sys.modules if name.startswith("gated_llama")]:
    del sys.modules[name]
try:
    import gated_llama
except ImportError as error:
    print(error)
"""


def test_import_after_remote_code_again_and_after_a_foreign_owner(saved):
    root, _ = saved
    result = subprocess.run(
        [sys.executable, "-c", ORDERS, str(root / "AutoModelForCausalLM")],
        capture_output=True,
        text=True,
        env={**clean_environment(root), "PYTHONPATH": str(Path(gated_llama.__file__).parents[1])},
        timeout=300,
    )
    assert result.returncode == 0, result.stderr
    assert "already registered by __main__.ForeignConfig" in result.stdout
    assert "gated_llama.configuration_gated.GatedLlamaConfig" in result.stdout


# What others rely on by name.


def test_weight_names():
    """Names in checkpoints are public: a change of one is a change of format."""
    attention = ["q_proj", "k_proj", "v_proj", "o_proj", "g_proj"]
    layer = [f"self_attn.{name}.{kind}" for name in attention for kind in ("weight", "bias")]
    layer += [f"self_attn.{name}.weight" for name in ("q_norm", "k_norm", "sdpa_norm")]
    layer += [f"mlp.{name}.{kind}" for name in ("gate_proj", "up_proj", "down_proj") for kind in ("weight", "bias")]
    layer += ["input_layernorm.weight", "post_attention_layernorm.weight"]
    everything = {"qkv_bias", "o_bias", "mlp_bias", "qk_norm", "gate_bias", "sdpa_output_norm"}
    model = filled(GatedLlamaForCausalLM, **dict.fromkeys(everything, True))
    expected = {f"model.layers.{i}.{name}" for i in range(3) for name in layer}
    assert set(model.state_dict()) == expected | {"model.embed_tokens.weight", "model.norm.weight", "lm_head.weight"}
    constant = filled(GatedLlamaForCausalLM, gate_input="constant").state_dict()
    assert {name for name in constant if ".g_" in name} == {f"model.layers.{i}.self_attn.g_param" for i in range(3)}


def test_the_attention_has_the_shape_that_engines_parse():
    """Its own forward looks the kernel up and calls it once, with `scaling=self.scaling`; `layer_idx` is an int."""
    tree = ast.parse(textwrap.dedent(inspect.getsource(GatedLlamaAttention.forward)))
    lookups = [
        node
        for node in ast.walk(tree)
        if isinstance(node, ast.Assign) and "ALL_ATTENTION_FUNCTIONS.get_interface(" in ast.unparse(node.value)
    ]
    assert len(lookups) == 1
    kernel = lookups[0].targets[0].id
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call) and ast.unparse(node.func) == kernel]
    assert len(calls) == 1
    assert {keyword.arg: ast.unparse(keyword.value) for keyword in calls[0].keywords}["scaling"] == "self.scaling"
    assert type(filled(GatedLlamaModel).layers[1].self_attn.layer_idx) is int


def test_a_kernel_may_flatten_its_output(monkeypatch):
    """Kernels of engines return [tokens, heads * width]: the gate finds its heads again."""
    model = filled(GatedLlamaForCausalLM)
    expected = model(IDS).logits
    sdpa = ALL_ATTENTION_FUNCTIONS["sdpa"]

    def flat(*args, **kwargs):
        output, weights = sdpa(*args, **kwargs)
        return output.flatten(0, 1).flatten(1), weights

    monkeypatch.setitem(ALL_ATTENTION_FUNCTIONS, "flat", flat)
    monkeypatch.setattr(model.config, "_attn_implementation_internal", "flat")
    torch.testing.assert_close(model(IDS).logits, expected, rtol=0, atol=0)
