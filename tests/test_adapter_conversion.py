"""PEFT adapters of an ungated source on its identity conversion: the same function, or a refusal."""

import json
import shutil
import sys

import peft
import pytest
import torch
from checkpoints import change_config, load, logits_of
from peft import PeftModel, get_peft_model
from safetensors.torch import load_file, save_file
from transformers import LlamaConfig, LlamaForCausalLM

import gated_llama_cli
from gated_llama.convert import convert_checkpoint
from gated_llama.retrofit import convert_adapter
from gated_llama.retrofit.adapter_conversion import METHODS


ALL = ["q_proj", "k_proj", "v_proj", "o_proj", "down_proj"]
GATES = {
    "G1": {},
    "G1, some layers": {"layers": [0, 2], "granularity": "elementwise"},
    "G2": {"position": "G2"},
    "G3": {"position": "G3", "granularity": "elementwise"},
    "G4": {"position": "G4"},
    "G5": {"position": "G5", "granularity": "elementwise"},
    "ns_sigmoid": {"activation": "ns_sigmoid"},
    "silu": {"activation": "silu"},
    "constant": {"gate_input": "constant", "position": "G2"},
}
EXACT = [name for name in GATES if "s_" not in name and name != "silu"]
ADAPTERS = {
    "lora": lambda: peft.LoraConfig(r=4, target_modules=ALL, lora_alpha=16, use_rslora=True),
    "regex": lambda: peft.LoraConfig(r=4, target_modules=r".*self_attn\..*_proj"),
    "all linear": lambda: peft.LoraConfig(r=4, target_modules="all-linear"),
    "ranks": lambda: peft.LoraConfig(
        r=4, target_modules=ALL, layers_to_transform=[1, 2], rank_pattern={"o_proj": 2}, alpha_pattern={"v_proj": 3}
    ),
    "biases": lambda: peft.LoraConfig(r=4, target_modules=["v_proj", "o_proj", "q_proj"], bias="lora_only"),
    "all biases": lambda: peft.LoraConfig(r=4, target_modules=["v_proj"], bias="all"),
    "lora bias": lambda: peft.LoraConfig(r=4, target_modules=ALL, lora_bias=True),
    "dora": lambda: peft.LoraConfig(r=4, target_modules=ALL, use_dora=True),
    "whole projections": lambda: peft.LoraConfig(
        r=4, target_modules=["down_proj"], modules_to_save=["o_proj", "v_proj", "embed_tokens"]
    ),
    "tokens": lambda: peft.LoraConfig(r=4, target_modules=ALL, trainable_token_indices=[3, 5]),
    "trainable tokens": lambda: peft.TrainableTokensConfig(token_indices=[3, 5]),
    "adalora": lambda: peft.AdaLoraConfig(target_modules=ALL, init_r=4, total_step=10),
    "loha": lambda: peft.LoHaConfig(r=4, target_modules=ALL),
    "lokr": lambda: peft.LoKrConfig(r=4, target_modules=ALL),
    "lokr, both": lambda: peft.LoKrConfig(r=1, target_modules=ALL, decompose_both=True, decompose_factor=4),
    "vera": lambda: peft.VeraConfig(r=4, target_modules=["q_proj", "o_proj", "v_proj", "k_proj"]),
    "ia3": lambda: peft.IA3Config(target_modules=ALL, feedforward_modules=["down_proj"]),
    "oft": lambda: peft.OFTConfig(r=0, oft_block_size=4, target_modules=ALL),
    "copies": lambda: peft.LNTuningConfig(target_modules=["o_proj", "k_proj", "input_layernorm"]),
}


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=96,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        initializer_range=0.2,
        attention_bias=True,
        tie_word_embeddings=False,
    )
    model = LlamaForCausalLM(config)
    for name, parameter in model.named_parameters():
        if name.endswith(".bias"):
            torch.nn.init.normal_(parameter, std=0.3)
    folder = tmp_path_factory.mktemp("adapter-conversion") / "source"
    model.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def gated(source):
    """`gated(name)`: folder of the identity conversion with that gate."""

    def make(name: str = "G1"):
        folder = source.with_name(name)
        if not folder.exists():
            convert_checkpoint(source, folder, **GATES[name])
        return folder

    return make


def plain(source, dtype=torch.float32):
    return LlamaForCausalLM.from_pretrained(source, attn_implementation="eager", dtype=dtype).eval()


@pytest.fixture(scope="module")
def adapter(source):
    """`adapter(name)`: folder of an adapter of the source, every tensor of it moved."""

    def make(name: str = "lora"):
        folder = source.with_name(f"adapter {name}")
        if not folder.exists():
            torch.manual_seed(1)
            model = get_peft_model(plain(source), ADAPTERS[name]())
            with torch.no_grad():
                for key, parameter in model.named_parameters():
                    if parameter.requires_grad or "ranknum" in key:
                        parameter.add_(torch.randn_like(parameter) * 0.2 * parameter.requires_grad)
            model.save_pretrained(folder)
        return folder

    return make


@pytest.mark.filterwarnings("ignore")  # of PEFT, about tied or trained embeddings
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("gate", EXACT)
@pytest.mark.parametrize("name", ADAPTERS)
def test_the_converted_adapter_computes_the_same_to_the_bit(name, gate, dtype, source, gated, adapter, tmp_path):
    expected = logits_of(PeftModel.from_pretrained(plain(source, dtype), adapter(name)))
    report = convert_adapter(adapter(name), gated(gate), tmp_path / "out")
    assert report.exact
    found = logits_of(PeftModel.from_pretrained(load(gated(gate), dtype=dtype), tmp_path / "out"))
    assert torch.equal(found, expected)
    assert not torch.equal(found, logits_of(plain(source, dtype)))
    if report.scaled:
        unconverted = PeftModel.from_pretrained(load(gated(gate), dtype=dtype), adapter(name))
        assert not torch.equal(logits_of(unconverted), expected)
