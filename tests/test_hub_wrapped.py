"""Folders of wrapped models and of classes derived from ours: they load as what was saved, or it is said why not."""

import json
import logging
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file
from torch import nn
from torch.nn.utils.parametrizations import weight_norm
from torch.nn.utils.parametrize import register_parametrization, remove_parametrizations
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM
from wrapped_models import IDS, tiny

from gated_llama import GatedLlamaConfig, GatedLlamaForCausalLM
from gated_llama.configuration_gated import AUTO_MAP, OWN_FILES


CODE = {f"{name}.py" for name in OWN_FILES}


def assert_loads_as(folder, model, **tolerance):
    """The folder holds the code of the package and no other, and gives the model's logits."""
    assert {path.name for path in folder.glob("*.py")} == CODE
    written = json.loads((folder / "config.json").read_text())
    assert (written["auto_map"], written["architectures"]) == (AUTO_MAP, ["GatedLlamaForCausalLM"])
    loaded = AutoModelForCausalLM.from_pretrained(folder)
    assert type(loaded) is GatedLlamaForCausalLM
    torch.testing.assert_close(loaded(IDS).logits, model(IDS).logits, **(tolerance or {"rtol": 0, "atol": 0}))


@pytest.mark.slow
def test_models_under_fsdp2(tmp_path):
    """Two ranks: `fully_shard` by hand, and a stock Trainer."""
    script = Path(__file__).with_name("wrapped_ranks.py")
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    result = subprocess.run([*launcher, script, tmp_path], capture_output=True, text=True, timeout=300)
    assert result.returncode == 0, result.stderr[-3000:]
    for way in ("by_hand", "trainer"):
        assert_loads_as(tmp_path / way, tiny())


def parametrised_top(model):
    """A parametrisation of the model's own parameter gives the model a class made at run time."""
    model.scale = nn.Parameter(torch.ones(1))
    register_parametrization(model, "scale", nn.Identity())
    assert type(model).__name__ == "ParametrizedGatedLlamaForCausalLM"
    return model


def test_a_class_made_at_run_time_is_not_written_down(tmp_path):
    """As FSDP2's, without processes: the folder names the class below it."""
    model = parametrised_top(tiny())
    model.save_pretrained(tmp_path, state_dict=tiny().state_dict())
    assert type(model).__name__ == "ParametrizedGatedLlamaForCausalLM"
    assert_loads_as(tmp_path, tiny())


def test_a_compiled_model(tmp_path):
    torch.compile(tiny(), backend="eager").save_pretrained(tmp_path / "whole")
    assert_loads_as(tmp_path / "whole", tiny())
    model = tiny()
    for layer in model.model.layers:
        layer.compile(backend="eager")
    model.save_pretrained(tmp_path / "layers")
    assert_loads_as(tmp_path / "layers", tiny())


def adapted():
    model = get_peft_model(tiny(), LoraConfig(target_modules=["q_proj", "g_proj"], init_lora_weights=False))
    return model.eval()


def test_a_merged_adapter(tmp_path):
    model = adapted()
    expected = model(IDS).logits
    merged = model.merge_and_unload()
    torch.testing.assert_close(merged(IDS).logits, expected, rtol=1e-4, atol=1e-4)
    merged.save_pretrained(tmp_path)
    assert_loads_as(tmp_path, merged)


def test_removed_parametrisations(tmp_path):
    model = tiny()
    for layer in model.model.layers:
        weight_norm(layer.mlp.up_proj)
        remove_parametrizations(layer.mlp.up_proj, "weight")
    model.save_pretrained(tmp_path)
    assert_loads_as(tmp_path, model)


def normed(model):
    weight_norm(model.model.layers[0].mlp.up_proj)
    return model


def compiled_layer(model):
    model.model.layers[1] = torch.compile(model.model.layers[1], backend="eager")
    return model


@pytest.mark.parametrize(
    ("wrapped", "words"),
    [
        (lambda: normed(tiny()), r"layers\.0\.mlp\.up_proj\.parametrizations\..*remove_parametrizations"),
        (lambda: compiled_layer(tiny()), r"layers\.1\._orig_mod\..*module\.compile\(\)"),
        (lambda: adapted().base_model.model, r"base_layer\.weight.*merge_and_unload"),
    ],
)
def test_names_that_nothing_loads(wrapped, words, tmp_path, caplog, monkeypatch):
    """Saving says so (a Trainer can still resume from such a folder), and loading refuses."""
    monkeypatch.setattr(logging.getLogger("transformers"), "propagate", True)
    model = wrapped()
    caplog.clear()
    model.save_pretrained(tmp_path)
    assert "under names that from_pretrained does not read" in caplog.text
    assert re.search(words, caplog.text)
    with pytest.raises(ValueError, match="has no weights for a part of the model"):
        AutoModelForCausalLM.from_pretrained(tmp_path)


def test_a_plain_save_warns_of_nothing(tmp_path, caplog, monkeypatch):
    monkeypatch.setattr(logging.getLogger("transformers"), "propagate", True)
    tiny().save_pretrained(tmp_path)
    assert not caplog.text


# Derived classes.

OWN = """
from torch import nn
from gated_llama import GatedLlamaConfig, GatedLlamaForCausalLM


class ScaledConfig(GatedLlamaConfig):
    scale: float = 2.0


class ScaledHead(GatedLlamaForCausalLM):
    def __init__(self, config):
        super().__init__(config)
        self.extra = nn.Linear(config.vocab_size, 1)
        self.post_init()

    def forward(self, *args, **kwargs):
        output = super().forward(*args, **kwargs)
        output.logits = output.logits * getattr(self.config, "scale", 3.0)
        return output
"""


@pytest.fixture
def own(tmp_path, monkeypatch):
    """A user's module with a derived config and a derived model."""
    (tmp_path / "code").mkdir()
    (tmp_path / "code" / "scaled_heads.py").write_text(OWN)
    monkeypatch.syspath_prepend(tmp_path / "code")
    monkeypatch.delitem(sys.modules, "scaled_heads", raising=False)
    return __import__("scaled_heads")


def test_a_derived_model_survives_saves(own, tmp_path, run_fresh):
    """Its class loads it, in this process and as remote code in another; so does the second generation."""
    model = own.ScaledHead(tiny().config).eval()
    model.save_pretrained(tmp_path / "first")
    again = own.ScaledHead.from_pretrained(tmp_path / "first").eval()
    assert torch.equal(again(IDS).logits, model(IDS).logits)
    again.save_pretrained(tmp_path / "second")
    for folder in (tmp_path / "first", tmp_path / "second"):
        assert {path.name for path in folder.glob("*.py")} == CODE | {"scaled_heads.py"}
        written = json.loads((folder / "config.json").read_text())
        assert written["auto_map"] == AUTO_MAP | {"AutoModelForCausalLM": "scaled_heads.ScaledHead"}
        assert written["architectures"] == ["ScaledHead"]
    torch.save(model(IDS).logits, tmp_path / "logits.pt")
    code = """
        import sys, torch
        from transformers import AutoModelForCausalLM
        model = AutoModelForCausalLM.from_pretrained(sys.argv[1], trust_remote_code=True).eval()
        assert type(model).__module__.startswith("transformers_modules."), type(model)
        assert torch.equal(model(torch.tensor([[5, 17, 33, 2, 60, 41]])).logits, torch.load(sys.argv[2]))
        model.save_pretrained(sys.argv[3])
    """
    arguments = (tmp_path / "second", tmp_path / "logits.pt", tmp_path / "third")
    result = run_fresh(code, *arguments, HF_HOME=str(tmp_path / "home"), OMP_NUM_THREADS="1")
    assert result.returncode == 0, result.stderr[-2000:]
    assert {path.name for path in (tmp_path / "third").glob("*.py")} == CODE | {"scaled_heads.py"}
    third = own.ScaledHead.from_pretrained(tmp_path / "third").eval()
    assert torch.equal(third(IDS).logits, model(IDS).logits)


@pytest.mark.parametrize("loader", [AutoModelForCausalLM, AutoModel, GatedLlamaForCausalLM])
@pytest.mark.parametrize("trust", [False, True])
def test_a_derived_model_is_not_loaded_as_its_parent(loader, trust, own, tmp_path):
    own.ScaledHead(tiny().config).save_pretrained(tmp_path / "model")
    with pytest.raises(ValueError, match=r"ScaledHead.*derived from those of gated-llama"):
        loader.from_pretrained(tmp_path / "model", trust_remote_code=trust)


def test_a_derived_model_without_a_file(tmp_path, run_fresh):
    """A notebook's class cannot be carried: the folder is not taken for its parent's."""
    result = run_fresh(
        OWN + f"\nScaledHead(GatedLlamaConfig(num_hidden_layers=1, hidden_size=32, vocab_size=96, "
        f"num_attention_heads=2, intermediate_size=8)).save_pretrained({str(tmp_path)!r})"
    )
    assert result.returncode == 0, result.stderr[-2000:]
    with pytest.raises(ValueError, match=r"ScaledHead.*derived"):
        AutoModelForCausalLM.from_pretrained(tmp_path)


def test_a_derived_head_starts_from_a_plain_folder(own, tmp_path):
    """What it adds outside the decoder may be missing there, once."""
    tiny().save_pretrained(tmp_path / "plain")
    model = own.ScaledHead.from_pretrained(tmp_path / "plain")
    model.save_pretrained(tmp_path / "own")
    own.ScaledHead.from_pretrained(tmp_path / "own")
    tensors = load_file(tmp_path / "own" / "model.safetensors")
    del tensors["extra.bias"]
    model.save_pretrained(tmp_path / "own", state_dict=tensors)
    with pytest.raises(ValueError, match=r"extra\.bias"):
        own.ScaledHead.from_pretrained(tmp_path / "own")


def test_a_derived_config(own, tmp_path):
    """Its class reads it; ours, and Auto classes, which know ours only, refuse it."""
    config = own.ScaledConfig(**{**tiny().config.to_dict(), "scale": 5.0})
    own.ScaledHead(config).save_pretrained(tmp_path)
    assert own.ScaledConfig.from_pretrained(tmp_path).scale == 5.0
    assert (tmp_path / "scaled_heads.py").read_text() == OWN
    for loader in (GatedLlamaConfig, AutoConfig, AutoModelForCausalLM):
        with pytest.raises(ValueError, match=r"scaled_heads\.ScaledConfig.*derived from GatedLlamaConfig"):
            loader.from_pretrained(tmp_path)


def test_maps_do_not_name_what_was_not_saved(tmp_path):
    """A plain model with a map of others, or of a Hub repository, is saved under the names of the package."""
    derived = {"AutoModelForTokenClassification": "scaled_heads.ScaledTags"}
    others = derived | {"AutoModel": "x/y--modeling_gated.GatedLlamaModel"}
    model = tiny()
    model.config.auto_map = GatedLlamaConfig(auto_map=others).auto_map
    assert model.config.auto_map == AUTO_MAP | derived
    model.save_pretrained(tmp_path)
    assert_loads_as(tmp_path, model)
