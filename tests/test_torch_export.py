"""The library's own exporters take the model as it is: `torch.export`, and ONNX where its packages are installed."""

import pytest
import torch
from transformers.exporters import DynamoConfig, DynamoExporter


# Transformers 5.24 and onnxscript 0.7 read tree specs in ways that torch 2.13 has deprecated.
pytestmark = pytest.mark.filterwarnings("ignore:.*treespec:FutureWarning")


def inputs(batch: int, tokens: int) -> dict[str, torch.Tensor]:
    ids = torch.randint(96, (batch, tokens), generator=torch.Generator().manual_seed(0))
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}


@pytest.mark.parametrize("granularity", ["headwise", "elementwise"])
def test_torch_export(granularity, tiny_model, randomize_gates):
    model = randomize_gates(tiny_model(gate_granularity=granularity, num_hidden_layers=2))
    exported = DynamoExporter().export(model, inputs(2, 7), config=DynamoConfig(dynamic=True))
    other = inputs(3, 11)  # a shape that the exporter has not seen
    with torch.no_grad():
        assert torch.equal(exported(**other).logits, model(**other).logits)


@pytest.mark.parametrize("granularity", ["headwise", "elementwise"])
def test_onnx(granularity, tiny_model, randomize_gates):
    reason = "the ONNX exporter of Transformers needs it; not a dependency of this package"
    pytest.importorskip("onnxscript", reason=reason)
    pytest.importorskip("onnxruntime", reason=reason)
    from transformers.exporters import OnnxConfig, OnnxExporter

    model = randomize_gates(tiny_model(gate_granularity=granularity, num_hidden_layers=2))
    exported = OnnxExporter().export(model, inputs(2, 7), config=OnnxConfig(dynamic=True))
    other = inputs(3, 11)
    with torch.no_grad():
        # Another runtime sums in another order: rounding of float32 through two layers.
        torch.testing.assert_close(exported(**other).logits, model(**other).logits, atol=2e-5, rtol=0)
