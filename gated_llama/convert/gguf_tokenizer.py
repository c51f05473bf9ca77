"""
The tokenizer of a checkpoint as metadata of a GGUF file, for the two kinds that llama.cpp shares with this decoder.

llama.cpp knows the pre-tokenizers of byte-level BPE by name only, so they are recognised by their definition in
tokenizer.json, never by the model's name. Source: llama.cpp b11549, src/llama-vocab.cpp.
"""

import json
import re
from typing import Any

from .loading import Loadable
from .pre_tokenizers import PRE_TOKENIZERS


# Options of a BPE model that must be off.
PLAIN_BPE = {"dropout": None, "continuing_subword_prefix": None, "end_of_word_suffix": None}

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = 1, 2, 3, 4, 5, 6
SPACE = "▁"


def tokenizer_metadata(source: Loadable, vocab_size: int) -> tuple[dict[str, Any], list[str]]:
    """Keys `tokenizer.*` and notes; ValueError where llama.cpp would give other ids."""
    if not source.has_tokenizer:
        raise ValueError(f"{source} has no tokenizer, which a GGUF file carries: put its files beside the weights.")
    tokenizer = source.load_tokenizer()
    raw = source.raw_tokenizer() or getattr(tokenizer, "backend_tokenizer", None)
    if raw is None:
        raise ValueError(f"{source} has a tokenizer without tokenizer.json: save it with a fast tokenizer first.")
    description = json.loads(raw.to_str())
    model = description["model"]
    if model["type"] != "BPE":
        raise ValueError(f"The tokenizer's model is {model['type']}, of which llama.cpp has no exact counterpart.")
    for name, neutral in PLAIN_BPE.items():
        if (model.get(name) or None) != neutral:
            raise ValueError(f"The tokenizer has {name}={model[name]!r}, which llama.cpp does not know.")
    merges = [tuple(pair.split(" ")) if isinstance(pair, str) else tuple(pair) for pair in model["merges"]]
    if model["byte_fallback"]:
        keys, notes = sentencepiece(description, merges, vocab_size)
    else:
        keys, notes = byte_level(description, merges)
    tokens, types = vocabulary(description, vocab_size)
    keys |= {"tokenizer.ggml.tokens": tokens, "tokenizer.ggml.token_type": types} | special_tokens(tokenizer)
    return keys, notes + swallowed_spaces(description)


def byte_level(description: dict, merges: list[tuple[str, str]]) -> tuple[dict[str, Any], list[str]]:
    """GPT-2's kind of BPE."""
    steps = pre_tokenizer_steps(description["pre_tokenizer"])
    model = description["model"]
    ignore_merges = bool(model.get("ignore_merges"))
    rules = ((name, known.steps, known.ignore_merges) for name, known in PRE_TOKENIZERS.items())
    name = next((name for name, *rule in rules if rule == [steps, ignore_merges]), None)
    if name is None:
        shown = json.dumps(description["pre_tokenizer"], ensure_ascii=False)
        option = "with ignore_merges" if ignore_merges else "without ignore_merges"
        raise ValueError(
            f"The pre-tokenizer {shown} ({option}) is none of those that can be written for llama.cpp: "
            f"{', '.join(PRE_TOKENIZERS)}."
        )
    normalizer = description["normalizer"]
    if normalizer not in (None, {"type": "NFC"}):
        raise ValueError(f"The tokenizer's normalizer {json.dumps(normalizer)} is unknown to llama.cpp.")
    notes = ["llama.cpp does not bring text into the form NFC, as this tokenizer does: pass it text that is."]
    keys = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": name,
        "tokenizer.ggml.merges": [" ".join(pair) for pair in merges],
    }
    return keys, notes if normalizer else []


def pre_tokenizer_steps(pre_tokenizer: dict | None) -> tuple[tuple, ...]:
    """A pre-tokenizer as (type, settings) of its steps; settings that do not change ids are left out."""
    if pre_tokenizer is None:
        return ()
    kind = pre_tokenizer["type"]
    if kind == "Sequence":
        return tuple(step for part in pre_tokenizer["pretokenizers"] for step in pre_tokenizer_steps(part))
    if kind == "Split":
        pattern = pre_tokenizer["pattern"]
        return ((kind, pattern.get("Regex"), pre_tokenizer["behavior"], pre_tokenizer["invert"]),)
    if kind == "Digits":
        return ((kind, pre_tokenizer["individual_digits"]),)
    if kind == "ByteLevel":
        return ((kind, pre_tokenizer["add_prefix_space"], pre_tokenizer.get("use_regex", True)),)
    if kind == "Metaspace":
        plain = pre_tokenizer["replacement"] == SPACE and not pre_tokenizer.get("split", True)
        return ((kind, pre_tokenizer.get("prepend_scheme", "always") if plain else None),)
    return ((kind,),)


def sentencepiece(
    description: dict, merges: list[tuple[str, str]], vocab_size: int
) -> tuple[dict[str, Any], list[str]]:
    """Llama's kind of BPE, over whole texts with a mark for spaces and a fall-back to bytes."""
    vocabulary = description["model"]["vocab"]
    absent = [token for token in (f"<0x{byte:02X}>" for byte in range(256)) if token not in vocabulary]
    if absent:
        raise ValueError(f"The tokenizer falls back to bytes and lacks {absent[0]}: llama.cpp wants all of them.")
    added = {token["content"] for token in description["added_tokens"]}
    pieces = [piece for piece in vocabulary if piece not in added and not re.fullmatch("<0x..>", piece)]
    scores = [float(-len(merges) - index) for index in range(vocab_size)]
    for piece, rank in merge_ranks(pieces, merges).items():
        scores[vocabulary[piece]] = float(-rank)
    keys = {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.pre": "default",
        "tokenizer.ggml.add_space_prefix": prefixes_space(description),
        "tokenizer.ggml.scores": scores,
    }
    return keys, []


def prefixes_space(description: dict) -> bool:
    """Whether a text gets a space in front; ValueError unless spaces are marked as SentencePiece does."""
    normalizer, pre_tokenizer = description["normalizer"], description["pre_tokenizer"]
    parts = (normalizer or {}).get("normalizers", [normalizer] if normalizer else [])
    marks = [part for part in parts if part == {"type": "Replace", "pattern": {"String": " "}, "content": SPACE}]
    prefix = [part for part in parts if part == {"type": "Prepend", "prepend": SPACE}]
    steps = pre_tokenizer_steps(pre_tokenizer)
    if not steps and len(marks) == 1 and len(parts) == len(marks) + len(prefix):
        return bool(prefix)
    if not parts and steps in ((("Metaspace", "first"),), (("Metaspace", "always"),), (("Metaspace", "never"),)):
        return steps[0][1] != "never"
    shown = json.dumps(normalizer, ensure_ascii=False), json.dumps(pre_tokenizer, ensure_ascii=False)
    raise ValueError(f"The pre-tokenizer {shown[1]} behind the normalizer {shown[0]} is not SentencePiece's.")


def merge_ranks(pieces: list[str], merges: list[tuple[str, str]]) -> dict[str, int]:
    """
    Piece -> rank of its first merge.

    llama.cpp merges any two pieces whose union is a piece, the best union first. That is the order of the merges if
    all merges into a piece follow one another and none is left out; ValueError otherwise.
    """
    known = set(pieces)
    ranks: dict[str, list[int]] = {}
    for rank, (left, right) in enumerate(merges):
        ranks.setdefault(left + right, []).append(rank)
    for piece in pieces:
        found = ranks.get(piece, [])
        possible = sum(piece[:cut] in known and piece[cut:] in known for cut in range(1, len(piece)))
        if possible != len(found) or (found and found[-1] - found[0] + 1 != len(found)):
            raise ValueError(f"The merges into {piece!r} are not those of SentencePiece, which llama.cpp expects.")
    return {piece: found[0] for piece, found in ranks.items()}


def vocabulary(description: dict, vocab_size: int) -> tuple[list[str], list[int]]:
    """Text and type of each id; ids without a token, which pad the embeddings, are unused ones."""
    model = description["model"]
    texts = {index: text for text, index in model["vocab"].items()}
    types = dict.fromkeys(texts, NORMAL)
    if model["byte_fallback"]:
        types |= {model["vocab"][f"<0x{byte:02X}>"]: BYTE for byte in range(256)}
    for token in description["added_tokens"]:
        texts[token["id"]] = token["content"]
        types[token["id"]] = CONTROL if token["special"] else USER_DEFINED
    if model["byte_fallback"] and model.get("unk_token"):
        types[model["vocab"][model["unk_token"]]] = UNKNOWN
    if max(texts) >= vocab_size:
        raise ValueError(f"The tokenizer has ids up to {max(texts)}, and the model embeds {vocab_size} tokens only.")
    ids = range(vocab_size)
    return [texts.get(index, f"[PAD{index}]") for index in ids], [types.get(index, UNUSED) for index in ids]


def special_tokens(tokenizer) -> dict[str, Any]:
    """Ids of special tokens, whether text gets the first and the last of them, and the chat template."""
    keys = {}
    for name, key in {"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding"}.items():
        index = getattr(tokenizer, f"{name}_token_id")
        if index is not None:
            keys[f"tokenizer.ggml.{key}_token_id"] = index
    plain, full = (tokenizer.encode("a", add_special_tokens=special) for special in (False, True))
    start = next((n for n in range(len(full)) if full[n:][: len(plain)] == plain), 0)
    around = {"bos": full[:start], "eos": full[start + len(plain) :]}
    for name, ids in around.items():
        if ids not in ([], [keys.get(f"tokenizer.ggml.{name}_token_id")]):
            raise ValueError(f"The tokenizer puts the ids {ids} around a text; llama.cpp can add {name} there only.")
        keys[f"tokenizer.ggml.add_{name}_token"] = bool(ids)
    template = tokenizer.chat_template
    template = template.get("default") if isinstance(template, dict) else template
    return keys | ({"tokenizer.chat_template": template} if template else {})


def swallowed_spaces(description: dict) -> list[str]:
    """A note on added tokens that take the spaces beside them, which llama.cpp leaves in the text."""
    found = [token["content"] for token in description["added_tokens"] if token["lstrip"] or token["rstrip"]]
    return [f"llama.cpp keeps spaces beside {', '.join(found)}, which this tokenizer swallows."] if found else []
