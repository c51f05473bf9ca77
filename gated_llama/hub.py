"""The model card of a gated checkpoint."""

from pathlib import Path

from huggingface_hub import ModelCard, ModelCardData

from .configuration_gated import GatedLlamaConfig


CARD = """\
# {name}

A checkpoint with [Gated Attention](https://arxiv.org/abs/2505.06708), converted from {base} by gated-llama.

| | |
|---|---|
{rows}

## Use

```python
from transformers import AutoModelForCausalLM, AutoTokenizer

model = AutoModelForCausalLM.from_pretrained("{name}", trust_remote_code=True)
tokenizer = AutoTokenizer.from_pretrained("{name}")
```

The modelling code is in this repository. Where the `gated-llama` package is installed and imported,
`trust_remote_code` is not needed.
"""

# What is taken over from the card of the source.
INHERITED = ("license", "license_name", "license_link", "language")


def model_card(
    config: GatedLlamaConfig, *, name: str, source_folder: Path | None = None, base_model: str | None = None
) -> str:
    """
    Model card with metadata for the Hub.

    Args:
        name: the model's name, used in the heading and the example.
        source_folder: folder of the source; licence and languages are taken from its README.md.
        base_model: Hub id of the source.
    """
    inherited = source_metadata(source_folder)
    data = ModelCardData(
        library_name="transformers",
        pipeline_tag="text-generation",
        tags=["gated-attention", config.model_type],
        base_model=base_model,
        **inherited,
    )
    record = config.gate_retrofit or {}
    kind = "a checkpoint of another gate layout" if record.get("policy") == "imported" else "an ungated checkpoint"
    base = f"[{base_model}](https://huggingface.co/{base_model})" if base_model else kind
    if model_type := record.get("source_model_type"):
        base += f" of type `{model_type}`"
    rows = "\n".join(f"| {key} | {value} |" for key, value in card_rows(config).items())
    return f"---\n{data.to_yaml()}\n---\n\n{CARD.format(name=name, base=base, rows=rows)}"


def card_rows(config: GatedLlamaConfig) -> dict[str, str]:
    """What a reader wants to know about the gate, name -> value."""
    record = config.gate_retrofit or {}
    layers = "all" if config.gate_layers is None else ", ".join(map(str, config.gated_layers))
    rows = {
        "position": config.gate_position or "none",
        "granularity": config.gate_granularity + (", one score for all heads" if config.gate_head_shared else ""),
        "score": f"{config.gate_activation}, {config.gate_operation}, from {config.gate_input}",
        "gated layers": f"{layers} of {config.num_hidden_layers}",
        "gate parameters": f"{config.gate_parameters_per_layer * len(config.gated_layers):,}",
        "start": record.get("policy", "trained"),
    }
    if fold := record.get("fold"):
        rows["folded"] = ", ".join(f"`{site}` times {factor:g}" for site, factor in fold.items()) + ", in gated layers"
    if adapters := adapters_of_the_source(record):
        rows["adapters of the ungated model"] = adapters
    if left := heads_at_identity(record.get("identity_heads"), config.num_attention_heads):
        rows["heads at the identity"] = f"layer/head {left}; their columns of `o_proj.weight` are doubled"
    if record.get("policy") == "transplant":
        rows["first token"] = "none: texts are read without the token that carried the sink"
    return rows


def adapters_of_the_source(record: dict) -> str | None:
    """What to do with PEFT adapters of the ungated model; None where they fit as they are, or there is none."""
    if record.get("policy") == "transplant":
        return "do not fit: merge them into it and transplant the result"
    if record.get("policy") == "identity" and record.get("fold"):
        return "fit after `gated-llama convert-adapter ADAPTER MODEL OUT`, which scales them; not as they are"
    return None


def heads_at_identity(left: dict[str | int, list[int]] | None, heads: int) -> str:
    """Layer/heads that a transplant left with the score 1/2: "4/0,7 11/all"; empty where there are none."""
    names = {
        int(layer): "all" if len(each) == heads else ",".join(map(str, each)) for layer, each in (left or {}).items()
    }
    return " ".join(f"{layer}/{names[layer]}" for layer in sorted(names) if names[layer])


def read_card(path: Path) -> str:
    """A card's text; bytes that are not UTF-8, in a card that others wrote, are given back by `write_card`."""
    return path.read_bytes().decode("utf-8-sig", errors="surrogateescape")


def write_card(path: Path, text: str) -> None:
    path.write_bytes(text.encode("utf-8", errors="surrogateescape"))


def source_metadata(folder: Path | None) -> dict:
    """Licence and languages that the card in `folder` states, if it has one that can be read."""
    path = folder / "README.md" if folder else None
    if path is None or not path.is_file():
        return {}
    try:
        stated = ModelCard(read_card(path), ignore_metadata_errors=True).data.to_dict()
    except Exception:  # metadata of a README is written by hand; a bad one is no reason not to convert
        return {}
    return {key: stated[key] for key in INHERITED if stated.get(key)}
