"""The oldest Transformers that the pair and the package state: installed beside, and run in a process of its own."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from gated_llama import modeling_gated


pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[1]
PROGRAM = """
import sys, torch, transformers
from gated_llama import GatedLlamaConfig, GatedLlamaForCausalLM
torch.manual_seed(0)
config = GatedLlamaConfig(vocab_size=96, hidden_size=40, intermediate_size=64, num_hidden_layers=3, head_dim=16,
    num_attention_heads=4, num_key_value_heads=2, gate_position="G1", qk_norm=True, sliding_window=4)
model = GatedLlamaForCausalLM(config).eval()
ids = torch.randint(0, 96, (2, 10))
cached, plain = (model.generate(ids, max_new_tokens=6, do_sample=False, use_cache=use) for use in (True, False))
assert torch.equal(cached, plain)
assert len(model.model(ids, output_gate_scores=True).gate_scores) == 3
model.save_pretrained(sys.argv[1])
sys.modules["gated_llama"] = None
again = transformers.AutoModelForCausalLM.from_pretrained(sys.argv[1], trust_remote_code=True)
assert torch.equal(again(ids).logits, model(ids).logits)
model.train()
model(ids, labels=ids).loss.backward()
assert model.model.layers[0].self_attn.g_proj.weight.grad.norm() > 0
print(transformers.__version__)
"""


def floor() -> str:
    return re.search(r'require_version\("transformers>=([\d.]+)"', Path(modeling_gated.__file__).read_text())[1]


def test_the_package_states_the_pairs_floor():
    stated = re.search(r'"transformers>=([\d.]+),', (ROOT / "pyproject.toml").read_text(encoding="utf-8"))[1]
    assert floor().startswith(stated)


def test_the_pair_works_on_its_floor(tmp_path):
    packages = [f"transformers=={floor()}", "huggingface_hub<3"]
    command = [sys.executable, "-m", "pip", "install", "-q", "--target", str(tmp_path / "old"), *packages]
    if (done := subprocess.run(command, capture_output=True, text=True)).returncode:
        pytest.skip(f"the floor could not be installed: {done.stderr.strip().splitlines()[-1:]}")
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(tmp_path / "model")],
        env=os.environ | {"PYTHONPATH": f"{tmp_path / 'old'}{os.pathsep}{ROOT}", "HF_MODULES_CACHE": str(tmp_path)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.split()[-1] == floor()
