"""
Transformers' common model tests for gated models and Qwen3; run by common_model_tests.py, which fetches them.

Not collected with the other tests: `transformers_tests` is the fetched package.
"""

import unittest

import torch
from transformers import (
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3ForQuestionAnswering,
    Qwen3ForSequenceClassification,
    Qwen3ForTokenClassification,
    Qwen3Model,
)
from transformers_tests import test_fsdp_mixin, test_tensor_parallel_mixin
from transformers_tests.generation.test_utils import GenerationTesterMixin
from transformers_tests.test_configuration_common import ConfigTester
from transformers_tests.test_fsdp_mixin import FSDPTesterMixin
from transformers_tests.test_modeling_common import ModelTesterMixin, ids_tensor
from transformers_tests.test_tensor_parallel_mixin import TensorParallelTesterMixin
from transformers_tests.test_training_mixin import TrainingTesterMixin

from gated_llama import (
    GatedLlamaConfig,
    GatedLlamaForCausalLM,
    GatedLlamaForQuestionAnswering,
    GatedLlamaForSequenceClassification,
    GatedLlamaForTokenClassification,
    GatedLlamaModel,
)


# The lists of model types that Transformers' own runs are limited to.
test_fsdp_mixin.FSDP_DISTRIBUTED_TEST_MODEL_TYPES = None
test_tensor_parallel_mixin.TP_DISTRIBUTED_TEST_MODEL_TYPES = None

SETTINGS = {
    "NoGate": {"gate_position": None},
    "G1": {"gate_position": "G1"},
    "G1HeadwiseFp32": {"gate_position": "G1", "gate_granularity": "headwise", "gate_in_fp32": True},
    "G1SharedBias": {"gate_position": "G1", "gate_head_shared": True, "gate_bias": True, "gate_layers": [1]},
    "G2Constant": {"gate_position": "G2", "gate_input": "constant"},
    "G3Add": {"gate_position": "G3", "gate_operation": "add", "gate_activation": "silu"},
    "G4NormsBiases": {"gate_position": "G4", "qk_norm": True, "qkv_bias": True, "o_bias": True, "mlp_bias": True},
    "G5States": {"gate_position": "G5", "gate_input": "states", "sdpa_output_norm": True},
}

GATED = [
    GatedLlamaModel,
    GatedLlamaForCausalLM,
    GatedLlamaForSequenceClassification,
    GatedLlamaForTokenClassification,
    GatedLlamaForQuestionAnswering,
]
QWEN3 = [
    Qwen3Model,
    Qwen3ForCausalLM,
    Qwen3ForSequenceClassification,
    Qwen3ForTokenClassification,
    Qwen3ForQuestionAnswering,
]

SIZES = {
    "vocab_size": 99,
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "hidden_act": "gelu",
    "max_position_embeddings": 512,
    "pad_token_id": 0,
    "bos_token_id": None,
    "eos_token_id": 1,
}


class Tester:
    """What the mixins ask about a model: its sizes, its config and a batch."""

    batch_size, seq_length, is_training = 13, 7, True
    num_hidden_layers, num_attention_heads = SIZES["num_hidden_layers"], SIZES["num_attention_heads"]
    hidden_size, vocab_size = SIZES["hidden_size"], SIZES["vocab_size"]

    def __init__(self, config_class, fields, heads):
        self.config_class, self.fields = config_class, fields
        self.base_model_class, self.causal_lm_class, self.sequence_classification_class = heads[:3]

    def get_config(self):
        return self.config_class(**SIZES, **self.fields)

    def prepare_config_and_inputs_for_common(self):
        ids = ids_tensor([self.batch_size, self.seq_length], self.vocab_size)
        ids = ids.masked_fill(ids == SIZES["pad_token_id"], 5)
        mask = torch.ones_like(ids).tril()
        return self.get_config(), {"input_ids": ids, "attention_mask": mask}


class Cases(
    ModelTesterMixin, GenerationTesterMixin, TrainingTesterMixin, TensorParallelTesterMixin, FSDPTesterMixin
):
    """All mixins; subclasses say `config_class`, `fields` and `heads`."""

    model_tester = None
    test_all_params_have_gradient = True
    model_split_percents = [0.5, 0.7, 0.8]  # as for Llama and Qwen3

    def setUp(self):
        super().setUp()
        self.model_tester = Tester(self.config_class, self.fields, self.all_model_classes)

    def test_config(self):
        ConfigTester(self, config_class=self.config_class, hidden_size=37, **self.fields).run_common_tests()


def case(name, config_class, fields, heads):
    attributes = {"config_class": config_class, "fields": fields, "all_model_classes": tuple(heads)}
    return type(f"{name}Test", (Cases, unittest.TestCase), attributes | {"__module__": __name__})


for setting, fields in SETTINGS.items():
    globals()[f"{setting}Test"] = case(setting, GatedLlamaConfig, fields, GATED)
Qwen3Test = case("Qwen3", Qwen3Config, {}, QWEN3)
