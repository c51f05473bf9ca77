"""A longer context by rotary parameters alone: what is written, what is refused, what is left as it was."""

import json
import shutil
from pathlib import Path

import pytest
import torch
import typer
from huggingface_hub import ModelCard
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM
from typer.testing import CliRunner

from gated_llama.convert import convert_checkpoint
from gated_llama.convert.extend_context import context_length, extend_context
from gated_llama_cli import extend_context as command


STORIES = Path(__file__).parent / "data" / "stories260K"
LENGTH = 512


@pytest.fixture
def source(tmp_path) -> Path:
    return Path(shutil.copytree(STORIES, tmp_path / "source"))


def edit(folder: Path, remove: tuple[str, ...] = (), **changes) -> Path:
    path = folder / "config.json"
    config = {key: value for key, value in json.loads(path.read_text()).items() if key not in remove}
    path.write_text(json.dumps(config | changes))
    return folder


def yarn(factor: float = 4.0, **more) -> dict:
    return {"rope_type": "yarn", "rope_theta": 10000.0, "factor": factor, **more}


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_yarn_is_written_from_the_pretraining_length(source, tmp_path):
    before = contents(source)
    report = extend_context(source, tmp_path / "x4", factor=4)
    assert (report.original_length, report.length, report.unchanged) == (LENGTH, 4 * LENGTH, False)
    config = AutoConfig.from_pretrained(tmp_path / "x4")
    assert config.max_position_embeddings == 4 * LENGTH
    assert config.rope_parameters == yarn(4, original_max_position_embeddings=LENGTH)
    assert json.loads((tmp_path / "x4" / "tokenizer_config.json").read_text())["model_max_length"] == 4 * LENGTH
    assert contents(source) == before
    after = contents(tmp_path / "x4")
    same = {name for name in before if after[name] == before[name]}
    assert set(before) - same == {"config.json", "tokenizer_config.json", "README.md"}
    assert after["README.md"].endswith(before["README.md"])
    assert after.keys() == before.keys()


def test_extended_models_work_gated_as_ungated(source, tmp_path):
    convert_checkpoint(source, tmp_path / "gated")
    ids = torch.randint(3, 500, (1, 2 * LENGTH), generator=torch.Generator().manual_seed(0))
    logits = []
    for name in ("source", "gated"):
        extend_context(tmp_path / name, tmp_path / f"{name}-x2", factor=2)
        model = AutoModelForCausalLM.from_pretrained(tmp_path / f"{name}-x2", dtype=torch.float32)
        with torch.no_grad():
            logits.append(model(ids).logits)
        plain = AutoModelForCausalLM.from_pretrained(tmp_path / name, dtype=torch.float32)
        with torch.no_grad():
            assert not torch.allclose(plain(ids).logits, logits[-1], atol=1e-3)
    assert torch.equal(*logits)


def test_windows_that_held_the_whole_context_are_refused(source, tmp_path):
    """As an export to AFMoE has them: its layers would go on to see the old length."""
    edit(source, model_type="qwen2", sliding_window=LENGTH, use_sliding_window=True, max_window_layers=0)
    with pytest.raises(ValueError, match=r"see a window of 512 tokens, which holds its 512 positions and would not"):
        extend_context(source, tmp_path / "x4", factor=4)
    edit(source, use_sliding_window=False)
    assert extend_context(source, tmp_path / "x4", factor=4).length == 4 * LENGTH


def test_models_without_one_rotary_table_are_refused(source, tmp_path):
    edit(source, model_type="gemma3_text", rope_theta=1e6, rope_local_base_freq=1e4, remove=("rope_parameters",))
    with pytest.raises(ValueError, match="rotary parameters per layer type"):
        extend_context(source, tmp_path / "x4", factor=4)
    edit(source, model_type="opt")
    with pytest.raises(ValueError, match="'opt' has no rotary embeddings"):
        extend_context(source, tmp_path / "x4", factor=4)
    assert not (tmp_path / "x4").exists()


def test_what_others_left_in_small_files_is_no_obstacle(source, tmp_path):
    settings = json.loads((source / "tokenizer_config.json").read_text())
    (source / "tokenizer_config.json").write_text(json.dumps(settings | {"model_max_length": None}))
    (source / "README.md").write_text("---\nlicense: [mit\n---\n\n# A card\n")
    extend_context(source, tmp_path / "x4", factor=4)
    card = (tmp_path / "x4" / "README.md").read_text()
    assert card.startswith("> Context extended to 2,048 tokens")
    assert card.endswith("# A card\n")


@pytest.mark.parametrize("place", ["header", "text"])
def test_a_card_that_is_not_utf8_keeps_its_bytes(place, source, tmp_path):
    words = {"header": "caf\xe9" if place == "header" else "mit", "text": "na\xefve"}
    card = f"---\nlicense: {words['header']}\n---\n\n# A {words['text']} card\r\n".encode("latin-1")
    (source / "README.md").write_bytes(card)
    extend_context(source, tmp_path / "x4", factor=4)
    found = (tmp_path / "x4" / "README.md").read_bytes()
    assert b"> Context extended to 2,048 tokens" in found
    assert found.endswith(b"# A na\xefve card\r\n")
    assert found.startswith(b"---\nlicense: mit\n---\n") is (place == "text")


MODEL_FILES = ("LICENSE", "chat_template.jinja", "modeling_gated.py", "picture.png", "generation_config.json")
OTHERS = (
    "consolidated.safetensors",
    "params.json",
    "training_args.bin",
    "trainer_state.json",
    "optimizer.pt",
    "optimizer_0.bin",
    "rng_state_0.pth",
    "model-00001-of-00002.safetensors",  # of an earlier save, in no index
    "pytorch_model.bin",
    "original/consolidated.00.pth",
    "runs/events",
    "global_step10/states.pt",
)


def test_only_the_model_is_carried_and_the_rest_is_named(source, tmp_path):
    for name in (*MODEL_FILES, *OTHERS, ".cache/hidden"):
        (source / name).parent.mkdir(exist_ok=True)
        (source / name).write_text("{}")
    report = extend_context(source, tmp_path / "x4", factor=4)
    assert report.left_behind == tuple(sorted({f"{name.split('/')[0]}/" if "/" in name else name for name in OTHERS}))
    assert set(contents(tmp_path / "x4")) == {*contents(STORIES), *MODEL_FILES}
    assert extend_context(STORIES, tmp_path / "clean", factor=4).left_behind == ()


@pytest.mark.parametrize("link", [False, True])
def test_shards_are_those_of_the_index(link, source, tmp_path):
    model = AutoModelForCausalLM.from_pretrained(source)
    model.save_pretrained(tmp_path / "shards", max_shard_size="200KB")
    (tmp_path / "shards" / "stale.safetensors").write_bytes(b"")
    report = extend_context(tmp_path / "shards", tmp_path / "x4", factor=4, link=link)
    assert report.left_behind == ("stale.safetensors",)
    weights = sorted(path.name for path in (tmp_path / "shards").glob("model*"))
    assert len(weights) > 2
    for name in weights:
        linked = (tmp_path / "x4" / name).samefile(tmp_path / "shards" / name)
        assert linked is (link and name.endswith(".safetensors"))
    found = AutoModelForCausalLM.from_pretrained(tmp_path / "x4")
    assert all(torch.equal(a, b) for a, b in zip(found.parameters(), model.parameters(), strict=True))


def test_the_code_of_a_gated_folder_is_fetched_from_the_hub(source, tmp_path, monkeypatch):
    convert_checkpoint(source, tmp_path / "hub")
    fetched = []

    def download(repository, allow_patterns, **options):
        fetched.extend(allow_patterns)
        return str(tmp_path / "hub")

    monkeypatch.setattr("gated_llama.convert.opening.snapshot_download", download)
    extend_context("someone/gated", tmp_path / "x4", factor=4)
    assert {"*.py", "README.md", "tokenizer.json", "model.safetensors"} <= set(fetched)
    assert (tmp_path / "x4" / "modeling_gated.py").is_file()


def test_idempotent(source, tmp_path):
    extend_context(source, tmp_path / "a", factor=4, rope_theta=1e6)
    report = extend_context(tmp_path / "a", tmp_path / "b", factor=4, rope_theta=1e6)
    assert report.unchanged
    assert contents(tmp_path / "a") == contents(tmp_path / "b")
    extend_context(source, tmp_path / "c", factor=2, method="linear")
    assert extend_context(tmp_path / "c", tmp_path / "d", factor=2, method="linear").unchanged
    assert contents(tmp_path / "c") == contents(tmp_path / "d")


@pytest.mark.parametrize("extended", [False, True], ids=["length as trained", "length extended"])
def test_source_with_yarn_and_its_original_length(extended, source, tmp_path):
    length = 4 * LENGTH if extended else LENGTH
    edit(source, rope_parameters=yarn(original_max_position_embeddings=LENGTH), max_position_embeddings=length)
    report = extend_context(source, tmp_path / "out", factor=4)
    assert report.unchanged is extended
    assert AutoConfig.from_pretrained(tmp_path / "out").max_position_embeddings == 4 * LENGTH


@pytest.mark.parametrize("length", [LENGTH, 4 * LENGTH])
def test_source_with_yarn_but_no_original_length_is_refused(length, source, tmp_path):
    """Transformers then takes max_position_embeddings for the length of pre-training, whichever it is."""
    edit(source, rope_parameters=yarn(), max_position_embeddings=length)
    with pytest.raises(ValueError, match="original_max_position_embeddings"):
        extend_context(source, tmp_path / "out", factor=4)


@pytest.mark.parametrize(
    ("rope", "length", "request_", "message"),
    [
        (yarn(original_max_position_embeddings=LENGTH), 4 * LENGTH, {"factor": 2}, "yarn x4.*contradicts yarn x2"),
        (yarn(original_max_position_embeddings=LENGTH), 4 * LENGTH, {"factor": 4, "method": "linear"}, "contradicts"),
        (yarn(original_max_position_embeddings=LENGTH), 4 * LENGTH, {"factor": 4, "rope_theta": 5e5}, "rope_theta"),
        (yarn(original_max_position_embeddings=LENGTH), 3 * LENGTH, {"factor": 4}, "contradicts itself"),
        ({"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0}, LENGTH, {"factor": 4}, "linear x2"),
        ({"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}, LENGTH, {"factor": 2}, "dynamic x2"),
        ({"rope_type": "default", "rope_theta": 1e4}, LENGTH, {"factor": 1.001}, "not a whole number"),
        ({"rope_type": "default", "rope_theta": 1e4}, LENGTH, {"factor": 1}, "greater than 1"),
        ({"rope_type": "default", "rope_theta": 1e4}, LENGTH, {"factor": 2, "method": "ntk"}, "yarn, linear"),
    ],
)
def test_contradictions_are_refused(rope, length, request_, message, source, tmp_path):
    edit(source, rope_parameters=rope, max_position_embeddings=length)
    with pytest.raises(ValueError, match=message):
        extend_context(source, tmp_path / "out", **request_)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    "scaling", [None, {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": LENGTH}]
)
def test_fields_of_earlier_versions_are_kept_in_step(scaling, source, tmp_path):
    edit(source, remove=("rope_parameters",), rope_theta=10000.0, rope_scaling=scaling)
    extend_context(source, tmp_path / "out", factor=4, rope_theta=None)
    raw = json.loads((tmp_path / "out" / "config.json").read_text())
    assert raw["rope_scaling"] == {"rope_type": "yarn", "factor": 4, "original_max_position_embeddings": LENGTH}
    assert raw["rope_theta"] == 10000.0
    assert raw["rope_parameters"] == yarn(4, original_max_position_embeddings=LENGTH)


@pytest.mark.parametrize("value", [float("nan"), float("-inf")])
def test_weights_that_are_not_finite(value, source, tmp_path):
    """Copies are read anyway; links are not, and so they are not looked at."""
    tensors = load_file(source / "model.safetensors")
    tensors["model.norm.weight"][1] = value
    save_file(tensors, source / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(
        ValueError, match=r"'model\.norm\.weight' of .*model\.safetensors holds values that are not finite"
    ):
        extend_context(source, tmp_path / "out", factor=4)
    assert not (tmp_path / "out").exists()
    extend_context(source, tmp_path / "linked", factor=4, link=True)


def test_links_share_the_weights(source, tmp_path):
    extend_context(source, tmp_path / "out", factor=2, link=True)
    assert (tmp_path / "out" / "model.safetensors").samefile(source / "model.safetensors")
    assert not (tmp_path / "out" / "tokenizer.json").samefile(source / "tokenizer.json")


def test_what_is_no_checkpoint_is_refused(source, tmp_path):
    (tmp_path / "weights.gguf").touch()
    with pytest.raises(ValueError, match="gated-llama convert"):
        extend_context(tmp_path / "weights.gguf", tmp_path / "out", factor=2)
    with pytest.raises(ValueError, match="does not exist"):
        extend_context("./nothing/here", tmp_path / "out", factor=2)
    with pytest.raises(ValueError, match="not empty"):
        extend_context(source, source.parent, factor=2)
    (source / "model.safetensors").unlink()
    with pytest.raises(ValueError, match="holds neither"):
        extend_context(source, tmp_path / "out", factor=2)


def test_interrupt_leaves_nothing(source, tmp_path, monkeypatch):
    def stop(*arguments):
        raise KeyboardInterrupt

    monkeypatch.setattr("gated_llama.convert.extend_context.check_written", stop)
    with pytest.raises(KeyboardInterrupt):
        extend_context(source, tmp_path / "out", factor=2)
    assert [path.name for path in tmp_path.iterdir()] == ["source"]


@pytest.mark.parametrize(("length", "expected"), [(LENGTH, 4 * LENGTH), (4 * LENGTH, 4 * LENGTH)])
def test_context_length_knows_yarn(length, expected, source):
    edit(source, rope_parameters=yarn(original_max_position_embeddings=LENGTH), max_position_embeddings=length)
    assert context_length(AutoConfig.from_pretrained(source)) == expected


@pytest.mark.parametrize("theta", [-5.0, 0.0, float("inf")])
def test_a_base_without_frequencies_is_refused(theta, source, tmp_path):
    with pytest.raises(ValueError, match="must be greater than 1"):
        extend_context(source, tmp_path / "out", factor=4, rope_theta=theta)
    assert not (tmp_path / "out").exists()


def test_the_card_says_so_and_drops_the_scores(source, tmp_path):
    index = [{"name": "m", "results": [{"task": {"type": "text-generation"}, "dataset": {"name": "d", "type": "d"},
              "metrics": [{"type": "acc", "value": 0.5}]}]}]  # fmt: skip
    header = json.dumps({"license": "mit", "model-index": index})
    (source / "README.md").write_text(f"---\n{header}\n---\n\n# A model\n")
    extend_context(source, tmp_path / "out", factor=4)
    card = ModelCard.load(tmp_path / "out" / "README.md")
    assert (card.data.license, card.data.eval_results) == ("mit", None)
    assert "model-index" not in card.content
    assert "extended to 2,048 tokens (yarn x4" in card.text
    assert card.text.rstrip().endswith("# A model")
    extend_context(tmp_path / "out", tmp_path / "again", factor=4)
    assert (tmp_path / "again" / "README.md").read_text() == (tmp_path / "out" / "README.md").read_text()


def test_command(source, tmp_path):
    app = typer.Typer()
    command.register(app)
    app.callback()(lambda: None)
    result = CliRunner().invoke(app, ["extend-context", str(source), str(tmp_path / "out"), "--factor", "4"])
    assert result.exit_code == 0, result.output
    assert "Not copied" not in result.output
    assert AutoConfig.from_pretrained(tmp_path / "out").max_position_embeddings == 4 * LENGTH
    (source / "params.json").write_text("{}")
    result = CliRunner().invoke(app, ["extend-context", str(source), str(tmp_path / "two"), "--factor", "4"])
    assert "Not copied, as no part of the model: params.json\n" in result.output
