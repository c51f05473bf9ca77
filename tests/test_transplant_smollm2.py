"""The transplant of a real sink: SmolLM2-135M-Instruct, fitted on the built-in text, without training."""

import json
from importlib.resources import files

import pytest

from gated_llama.retrofit import transplant_checkpoint
from gated_llama_cli.demo import find_smollm2


pytestmark = pytest.mark.slow


def test_the_sink_and_the_massive_activations_go_and_the_model_stays(tmp_path):
    try:
        source = find_smollm2()
    except ValueError as error:
        pytest.skip(str(error))
    text = str(files("gated_llama.diagnostics").joinpath("sample.txt"))
    transplant_checkpoint(source, tmp_path / "out", [text], tokens=4088, bos="<|endoftext|>")
    report = json.loads((tmp_path / "out" / "transplant.json").read_text())
    before, after = report["measures"]["source"], report["measures"]["result"]
    assert before["first_token_attention"] > 0.2
    assert before["max_activation"] > 15_000
    assert after["first_token_attention"] < 0.04
    # What ordinary tokens of the source reach in the last layer, and in the middle.
    assert after["max_activation"] < 2_000
    assert after["max_activation_per_layer"][20] < 400
    (held_out,) = report["measures"]["held_out"]
    assert held_out["kl"] < 0.25
    assert held_out["perplexity_ratio"] < 1.25
    units = {(layer["layer"], unit) for layer in report["layers"] for unit in layer["quieted"]}
    assert {(11, 1229), (11, 1487), (28, 678)} <= units
