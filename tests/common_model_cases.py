"""
Transformers' common model tests for gated models and Qwen3; run by common_model_tests.py, which fetches them.

Not collected with the other tests: `transformers_tests` is the fetched package.
"""

import unittest
from unittest import mock

import tokenizers
import torch
from transformers import (
    PreTrainedTokenizerFast,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3ForQuestionAnswering,
    Qwen3ForSequenceClassification,
    Qwen3ForTokenClassification,
    Qwen3Model,
    pipeline,
)
from transformers.models.auto import modeling_auto
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
from gated_llama.checkpoint_gated import StrictCheckpoints


# The lists of model types that Transformers' own runs are limited to.
test_fsdp_mixin.FSDP_DISTRIBUTED_TEST_MODEL_TYPES = None
test_tensor_parallel_mixin.TP_DISTRIBUTED_TEST_MODEL_TYPES = None

SDPA = {"gate_position": "sdpa_output"}
SETTINGS = {
    "NoGate": {"gate_position": None},
    "Elementwise": SDPA,
    "HeadwiseFp32": SDPA | {"gate_granularity": "headwise", "gate_in_fp32": True},
    "SharedBias": SDPA | {"gate_head_shared": True, "gate_bias": True, "gate_layers": [1]},
    "ValueConstant": {"gate_position": "value", "gate_input": "constant"},
    "KeyAdd": {"gate_position": "key", "gate_operation": "add", "gate_activation": "silu"},
    "QueryNormsBiases": {"gate_position": "query"}
    | dict.fromkeys(["qk_norm", "qkv_bias", "o_bias", "mlp_bias"], True),
    "DenseStates": {"gate_position": "dense_output", "gate_input": "states", "sdpa_output_norm": True},
}
# Tests set a window on every config that has the field, and ours asks for layers that slide.
WINDOW = {"sliding_window": 64, "layer_types": ["full_attention", "sliding_attention"]}

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

# Tests tell heads apart by these lists of names, which hold the library's own only.
for names, head in zip(
    (
        modeling_auto.MODEL_MAPPING_NAMES,
        modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
        modeling_auto.MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES,
        modeling_auto.MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING_NAMES,
        modeling_auto.MODEL_FOR_QUESTION_ANSWERING_MAPPING_NAMES,
    ),
    GATED,
    strict=True,
):
    names[GatedLlamaConfig.model_type] = head.__name__

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


class Cases(ModelTesterMixin, GenerationTesterMixin, TrainingTesterMixin, TensorParallelTesterMixin, FSDPTesterMixin):
    """All mixins; subclasses say `config_class`, `fields` and `heads`."""

    model_tester = None
    model_split_percents = [0.5, 0.7, 0.8]  # as for Llama and Qwen3

    def setUp(self):
        super().setUp()
        self.model_tester = Tester(self.config_class, self.fields, self.all_model_classes)

    def test_pipelines(self):
        """In place of PipelineTesterMixin, which needs files that are not distributed, and models of the Hub."""
        words = {word: i for i, word in enumerate(["[PAD]", "[EOS]", *map(str, range(SIZES["vocab_size"] - 2))])}
        model = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="[EOS]"))
        model.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
        tokenizer = PreTrainedTokenizerFast(tokenizer_object=model, pad_token="[PAD]", eos_token="[EOS]")
        tasks = ["feature-extraction", "text-generation", "text-classification", "token-classification"]
        for task, head in zip(tasks, self.all_model_classes, strict=False):
            run = pipeline(task, model=head(self.model_tester.get_config()).eval(), tokenizer=tokenizer, device="cpu")
            alone, padded = run("1 2 3"), run(["1 2 3", "4 5 6 7 8"], batch_size=2)
            assert len(padded) == 2
            assert type(padded[0]) is (dict if task == "text-classification" else type(alone))

    def test_config(self):
        fields = {"hidden_size": 37, "num_hidden_layers": 2} | self.fields
        ConfigTester(self, config_class=self.config_class, **fields).run_common_tests()


class GatedCases(Cases):
    """Tests of incomplete files read the library's report of what is missing; our refusal is set aside there."""

    def reported(self, test):
        with mock.patch.object(StrictCheckpoints, "_loading_faults", return_value={}):
            test()

    def test_can_init_all_missing_weights(self):
        self.reported(super().test_can_init_all_missing_weights)

    def test_correct_missing_keys(self):
        self.reported(super().test_correct_missing_keys)

    def test_base_model_prefix_loads_base_weights(self):
        self.reported(super().test_base_model_prefix_loads_base_weights)

    def test_load_with_mismatched_shapes(self):
        self.reported(super().test_load_with_mismatched_shapes)

    def test_model_weights_reload_no_missing_tied_weights(self):
        self.reported(super().test_model_weights_reload_no_missing_tied_weights)


def case(name, base, config_class, fields, heads):
    attributes = {"config_class": config_class, "fields": fields, "all_model_classes": tuple(heads)}
    return type(f"{name}Test", (base, unittest.TestCase), attributes | {"__module__": __name__})


for setting, gate in SETTINGS.items():
    globals()[f"{setting}Test"] = case(setting, GatedCases, GatedLlamaConfig, WINDOW | gate, GATED)
Qwen3Test = case("Qwen3", Cases, Qwen3Config, {}, QWEN3)
