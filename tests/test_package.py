"""The package as a whole: import direction, sizes, public names, config files, registration."""

import ast
import json
import sys
from pathlib import Path

import pytest
from transformers.dynamic_module_utils import get_relative_imports

import gated_llama
from gated_llama.configuration_gated import AUTO_MAP, GatedLlamaConfig


ROOT = Path(__file__).parents[1]
PACKAGES = ("gated_llama", "gated_llama_cli")

# What travels with every checkpoint, and what each file imports of the others.
HUB_FILES = {
    "configuration_gated": [],
    "parts_gated": ["configuration_gated"],
    "checkpoint_gated": ["configuration_gated"],
    "modeling_gated": ["checkpoint_gated", "configuration_gated", "parts_gated"],
}

# Each part may import itself and parts of a lower rank.
RANKS = {
    "gated_llama.configuration_gated": 0,
    "gated_llama.parts_gated": 1,
    "gated_llama.checkpoint_gated": 1,
    "gated_llama.modeling_gated": 2,
    "gated_llama.hub": 2,
    "gated_llama.override": 3,
    "gated_llama.quantization": 3,
    "gated_llama.registration": 3,
    "gated_llama": 4,
    "gated_llama.vllm_plugin": 5,
    "gated_llama.diagnostics": 5,
    "gated_llama.convert": 6,
    "gated_llama.retrofit": 7,
    "gated_llama.evaluation": 7,
    "gated_llama_cli": 8,
}


def python_files(*folders: str) -> list[Path]:
    return sorted(path for folder in folders for path in (ROOT / folder).rglob("*.py"))


def module_name(path: Path) -> str:
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


def part_of(module: str) -> str:
    """A file or folder directly below `gated_llama`, that package itself, or the whole of another package."""
    parts = module.split(".")
    return ".".join(parts[:2]) if parts[0] == "gated_llama" else parts[0]


def imports(text: str, package: str) -> set[str]:
    """Absolute names of the modules that code in `package` imports, at whatever depth of nesting."""
    found = set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            above = package.split(".")
            above = above[: len(above) - node.level + 1] if node.level else []
            base = ".".join(filter(None, [*above, node.module]))
            found |= {f"{base}.{alias.name}" if is_module(f"{base}.{alias.name}") else base for alias in node.names}
    return found


def is_module(name: str) -> bool:
    path = ROOT.joinpath(*name.split("."))
    return path.is_dir() or path.with_suffix(".py").is_file()


def forbidden_imports(text: str, module: str, package: str) -> set[str]:
    part = part_of(module)
    ours = {name for name in imports(text, package) if name.split(".")[0].startswith("gated_llama")}
    return {name for name in ours if part_of(name) != part and RANKS[part_of(name)] >= RANKS[part]}


@pytest.mark.parametrize("path", python_files(*PACKAGES), ids=module_name)
def test_imports_go_one_way(path):
    module = module_name(path)
    assert part_of(module) in RANKS, f"{part_of(module)} is new: give it a rank"
    package = module if path.name == "__init__.py" else module.rpartition(".")[0]
    assert not forbidden_imports(path.read_text(encoding="utf-8"), module, package)


@pytest.mark.parametrize(
    "line",
    [
        "import gated_llama_cli.console",
        "from gated_llama_cli import app",
        "from .. import evaluation",
        "def late():\n    from gated_llama.retrofit import train",
    ],
)
def test_an_import_that_goes_back_is_found(line, monkeypatch):
    monkeypatch.setattr(sys.modules[__name__], "is_module", lambda name: name.islower())
    place = {"module": "gated_llama.convert.policies", "package": "gated_llama.convert"}
    assert forbidden_imports(line, **place)
    assert not forbidden_imports("from .. import modeling_gated\nfrom .sources import SOURCES", **place)


@pytest.mark.parametrize("name", HUB_FILES)
def test_hub_files_need_nothing_of_this_package(name):
    path = ROOT / "gated_llama" / f"{name}.py"
    roots = {module.split(".")[0] for module in imports(path.read_text(encoding="utf-8"), package="beside")}
    assert roots - set(sys.stdlib_module_names) <= {"torch", "transformers", "huggingface_hub", "beside"}
    assert sorted(get_relative_imports(path)) == HUB_FILES[name]


@pytest.mark.parametrize("path", python_files(*PACKAGES, "benchmarks"), ids=module_name)
def test_files_stay_short(path):
    assert path.read_text(encoding="utf-8").count("\n") <= 450


@pytest.mark.parametrize("path", python_files(*PACKAGES, "benchmarks", "tests"), ids=module_name)
def test_functions_stay_short(path):
    nodes = ast.walk(ast.parse(path.read_text(encoding="utf-8")))
    functions = [node for node in nodes if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]
    assert not {function.name: lines for function in functions if (lines := code_lines(function)) > 60}


def code_lines(function: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """Lines of a function without its docstring."""
    first = function.body[0]
    docstring = first.end_lineno - first.lineno + 1 if ast.get_docstring(function) is not None else 0
    return function.end_lineno - function.lineno + 1 - docstring


@pytest.mark.parametrize("path", python_files(*PACKAGES), ids=module_name)
def test_a_missing_extra_is_an_import_error(path):
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Raise) and "pip install 'gated-llama[" in ast.unparse(node).replace('"', "'"):
            assert ast.unparse(node).startswith("raise ImportError(")


# Public names: what checkpoints, adapters and remote code depend on.


def test_file_and_class_names():
    assert gated_llama.__all__ == [
        "GatedLlamaConfig",
        "GatedLlamaForCausalLM",
        "GatedLlamaForQuestionAnswering",
        "GatedLlamaForSequenceClassification",
        "GatedLlamaForTokenClassification",
        "GatedLlamaModel",
        "GatedLlamaPreTrainedModel",
        "gate_override",
        "neutral_scores",
    ]
    assert GatedLlamaConfig.model_type == "gated_llama"
    assert AUTO_MAP == {
        "AutoConfig": "configuration_gated.GatedLlamaConfig",
        "AutoModel": "modeling_gated.GatedLlamaModel",
        "AutoModelForCausalLM": "modeling_gated.GatedLlamaForCausalLM",
        "AutoModelForSequenceClassification": "modeling_gated.GatedLlamaForSequenceClassification",
        "AutoModelForTokenClassification": "modeling_gated.GatedLlamaForTokenClassification",
        "AutoModelForQuestionAnswering": "modeling_gated.GatedLlamaForQuestionAnswering",
    }


def test_names_of_the_conversion(run_fresh):
    code = """
        import sys
        from gated_llama import convert
        assert convert.__all__ == ["ConversionReport", "ExportReport", "convert_checkpoint", "export_checkpoint"]
        assert "gated_llama.convert.export" not in sys.modules
        assert all(callable(getattr(convert, name)) for name in convert.__all__)
        from gated_llama.convert import ExportReport, export_checkpoint
        assert export_checkpoint.__module__ == ExportReport.__module__ == "gated_llama.convert.export"
        try:
            convert.nothing
        except AttributeError as error:
            assert "has no attribute 'nothing'" in str(error)
    """
    result = run_fresh(code)
    assert result.returncode == 0, result.stderr


def test_weight_names_and_shapes(tiny_model):
    layer = "model.layers.2."
    everything = {"qkv_bias": True, "o_bias": True, "mlp_bias": True, "qk_norm": True, "sdpa_output_norm": True}
    state = tiny_model(gate_bias=True, **everything).state_dict()
    shapes = {name: tuple(weight.shape) for name, weight in state.items() if layer in name or ".layers." not in name}
    assert shapes == {
        "model.embed_tokens.weight": (96, 40),
        layer + "input_layernorm.weight": (40,),
        layer + "self_attn.q_proj.weight": (64, 40),
        layer + "self_attn.q_proj.bias": (64,),
        layer + "self_attn.k_proj.weight": (32, 40),
        layer + "self_attn.k_proj.bias": (32,),
        layer + "self_attn.v_proj.weight": (32, 40),
        layer + "self_attn.v_proj.bias": (32,),
        layer + "self_attn.q_norm.weight": (16,),
        layer + "self_attn.k_norm.weight": (16,),
        layer + "self_attn.sdpa_norm.weight": (16,),
        layer + "self_attn.g_proj.weight": (64, 40),
        layer + "self_attn.g_proj.bias": (64,),
        layer + "self_attn.o_proj.weight": (40, 64),
        layer + "self_attn.o_proj.bias": (40,),
        layer + "post_attention_layernorm.weight": (40,),
        layer + "mlp.gate_proj.weight": (64, 40),
        layer + "mlp.gate_proj.bias": (64,),
        layer + "mlp.up_proj.weight": (64, 40),
        layer + "mlp.up_proj.bias": (64,),
        layer + "mlp.down_proj.weight": (40, 64),
        layer + "mlp.down_proj.bias": (40,),
        "model.norm.weight": (40,),
        "lm_head.weight": (96, 40),
    }


@pytest.mark.parametrize(
    ("gate", "expected"),
    [
        ({"gate_position": None}, {}),
        ({"gate_granularity": "headwise"}, {"g_proj.weight": (4, 40)}),
        ({"gate_position": "value"}, {"g_proj.weight": (32, 40)}),
        ({"gate_position": "key", "gate_granularity": "headwise"}, {"g_proj.weight": (2, 40)}),
        ({"gate_position": "query"}, {"g_proj.weight": (64, 40)}),
        ({"gate_position": "dense_output"}, {"g_proj.weight": (40, 40)}),
        ({"gate_input": "constant"}, {"g_param": (4, 16)}),
        ({"gate_input": "constant", "gate_granularity": "headwise"}, {"g_param": (4, 1)}),
        ({"gate_input": "states"}, {}),
        ({"gate_layers": [1]}, {}),
    ],
)
def test_gate_weights_by_position(tiny_model, gate, expected):
    prefix = "model.layers.0.self_attn."
    state = tiny_model(**gate).state_dict()
    gates = {name.removeprefix(prefix): tuple(state[name].shape) for name in state if name.startswith(prefix + "g_")}
    assert gates == expected


# config.json

ROUND_TRIPS = {
    "decoder": {
        "vocab_size": 50,
        "hidden_size": 24,
        "intermediate_size": 20,
        "num_hidden_layers": 2,
        "num_attention_heads": 6,
        "num_key_value_heads": 3,
        "head_dim": 6,
        "hidden_act": "gelu",
        "max_position_embeddings": 77,
        "initializer_range": 0.03,
        "rms_norm_eps": 1e-5,
        "use_cache": False,
        "tie_word_embeddings": True,
        "rope_parameters": {"rope_type": "linear", "rope_theta": 5000.0, "factor": 2.0},
        "attention_dropout": 0.1,
        "pad_token_id": 3,
        "bos_token_id": 4,
        "eos_token_id": [5, 6],
        "qkv_bias": True,
        "o_bias": True,
        "mlp_bias": True,
        "qk_norm": True,
        "norms_in_fp32": True,
        "sliding_window": 9,
        "layer_types": ["full_attention", "sliding_attention"],
        "sdpa_output_norm": True,
    },
    "gate": {
        "gate_position": "value",
        "gate_granularity": "headwise",
        "gate_head_shared": True,
        "gate_operation": "add",
        "gate_activation": "silu",
        "gate_bias": True,
        "gate_layers": [0, 2],
        "gate_init": "zeros",
        "gate_in_fp32": True,
        "gate_retrofit": {"policy": "identity", "fold": 2.0},
    },
    "constant gate": {"gate_position": "query", "gate_input": "constant"},
    # Only one format exists so far, so that there is no other valid version to write.
    "version": {"gate_format_version": 1},
}


@pytest.mark.parametrize("name", ROUND_TRIPS)
def test_every_field_survives_json(name, tmp_path):
    config = GatedLlamaConfig(**ROUND_TRIPS[name])
    config.save_pretrained(tmp_path)
    loaded = GatedLlamaConfig.from_pretrained(tmp_path)
    written = json.loads((tmp_path / "config.json").read_text())
    for field, value in ROUND_TRIPS[name].items():
        assert getattr(loaded, field) == written[field] == value
    assert loaded.to_dict() == config.to_dict()


def test_round_trips_cover_every_field():
    fields = set(GatedLlamaConfig.__annotations__)
    assert fields == {field for values in ROUND_TRIPS.values() for field in values}


def test_defaults_are_written_too(tmp_path):
    config = GatedLlamaConfig()
    config.save_pretrained(tmp_path)
    written = json.loads((tmp_path / "config.json").read_text())
    gate = {field for field in GatedLlamaConfig.__annotations__ if field.startswith("gate_")}
    others = {"rope_parameters", "tie_word_embeddings", "qkv_bias", "o_bias", "mlp_bias", "qk_norm", "layer_types"}
    assert gate | others <= set(written)


# Registration


def test_which_code_loads_a_folder(tiny_model, run_fresh, tmp_path):
    """The folder's own until the package is imported, then the package's; importing it again and again is harmless."""
    tiny_model().save_pretrained(tmp_path / "saved")
    code = """
        import importlib, sys
        from transformers import AutoModelForCausalLM
        def load(trust_remote_code):
            return type(AutoModelForCausalLM.from_pretrained(sys.argv[1], trust_remote_code=trust_remote_code))
        assert load(True).__module__.startswith("transformers_modules.")
        import gated_llama
        importlib.reload(gated_llama)
        for name in [name for name in sys.modules if name.split(".")[0] == "gated_llama"]:
            del sys.modules[name]
        import gated_llama
        assert load(False) is load(True) is gated_llama.GatedLlamaForCausalLM
    """
    result = run_fresh(code, tmp_path / "saved", HF_MODULES_CACHE=str(tmp_path / "modules"))
    assert result.returncode == 0, result.stderr


def test_a_foreign_owner_of_the_model_type_is_named(run_fresh):
    code = """
        from transformers import AutoConfig, PreTrainedConfig
        class ForeignConfig(PreTrainedConfig):
            model_type = "gated_llama"
        AutoConfig.register("gated_llama", ForeignConfig)
        import gated_llama
    """
    last = run_fresh(code).stderr.strip().splitlines()[-1]
    assert last.startswith("ImportError: ")
    assert "__main__.ForeignConfig" in last
    assert "gated_llama.configuration_gated.GatedLlamaConfig" in last
