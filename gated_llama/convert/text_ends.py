"""Ids at which generation ends, told to readers that would take others where none are named."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..configuration_gated import GatedLlamaConfig
from .tensor_files import read_json
from .tokenizer import GENERATION_CONFIG, TOKEN_IDS


# What a GGUF file can name; llama.cpp stops at each.
GGUF_KEYS = tuple(f"tokenizer.ggml.{kind}_token_id" for kind in ("eos", "eot", "eom"))


def write_token_ids(config: GatedLlamaConfig, folder: Path):
    """Writes a generation_config.json where there is none: without it vLLM ends texts of a Step-3.5 at ids 2 and 3."""
    path = folder / GENERATION_CONFIG
    if not path.exists():
        ids = {name: getattr(config, name) for name in TOKEN_IDS}
        path.write_text(json.dumps(ids, indent=2) + "\n", encoding="utf-8")


def gguf_ends(
    folder: Path, config: GatedLlamaConfig, tokenizer: Mapping[str, Any]
) -> tuple[dict[str, int], list[str]]:
    """The ids of generation_config.json (else config.json), as keys beside the tokenizer's own; and notes."""
    path = folder / GENERATION_CONFIG
    ids = read_json(path).get("eos_token_id") if path.exists() else config.eos_token_id
    ids = [] if ids is None else ids if isinstance(ids, list) else [ids]
    free = [key for key in GGUF_KEYS if key not in tokenizer]
    named = [tokenizer[key] for key in GGUF_KEYS if key in tokenizer]
    others = [index for index in dict.fromkeys(ids) if index not in named]
    left = others[len(free) :]
    notes = [f"A GGUF file has no place for {left} among the ids that end a text: name them as stop words."]
    return dict(zip(free, others, strict=False)), notes if left else []
