"""Files that travel with the weights, and a tokenizer that gives the source's ids.

Transformers chooses the tokenizer class from the model type, and some classes rebuild the pre-tokenizer: the same
files can give other ids under another type. So the ids are compared, and a class that keeps them is pinned.
"""

import json
import shutil
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import NamedTuple

from tokenizers import Tokenizer
from transformers import AutoTokenizer, GenerationConfig
from transformers.utils import is_protobuf_available, is_sentencepiece_available

from .config_file import has_mark, library_config
from .gguf_vocabulary import MODEL, check_vocabulary, complete, loading_options, stated_tokens
from .tensor_files import one_line, read_json


TOKENIZER_CONFIG = "tokenizer_config.json"
GENERATION_CONFIG = "generation_config.json"
TOKEN_IDS = ("bos_token_id", "eos_token_id", "pad_token_id")

# Carried byte for byte, but for the class in tokenizer_config.json.
CARRIED = (
    "tokenizer.json",
    TOKENIZER_CONFIG,
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "vocab.txt",
    "merges.txt",
    "*.model",
    "*.tiktoken",
    "tekken.json",
    "chat_template.jinja",
    "chat_template.json",
    "additional_chat_templates/*.jinja",
    GENERATION_CONFIG,
    "LICENSE*",
    "LICENCE*",
    "NOTICE*",
    "USE_POLICY*",
)

# Reads tokenizer.json as it is; under this name in every version of the library.
GENERIC_CLASS = "PreTrainedTokenizerFast"

VOCABULARIES = ("tokenizer.json", "vocab.json", "vocab.txt", "*.model", "*.tiktoken", "tekken.json")

# Where tokenizer classes are known to differ: digits, runs of spaces, line ends, unspaced scripts, emoji, accents.
PROBES = (
    "Hello world, it's 2024.",
    "1234567890 3.14159 1,000,000 0x1F 12:34",
    "a  b   c    d     e",
    "    def f(x):\n        return x ** 2\n\n\n# end\t\t\n",
    " leading and trailing ",
    "line one\nline two\r\nline three\n\n",
    "中文分词测试,今天天气很好。日本語のテスト 한국어 시험",
    "😀👩‍👩‍👧‍👦🇫🇷 ❤️ ok",
    "Café naïve coöperate — “quotes” … ½ ²",
    "ﬁne ＦＵＬＬ width \u200b zero",
    "don't I'LL we've they'd",
    'https://example.org/a_b?c=d&e=f#g <b>bold</b> {"k": [1, 2]}',
)


class Ids(NamedTuple):
    """Token ids of one text, without and with special tokens."""

    plain: list[int]
    full: list[int]


def carry_files(checkpoint, folder: Path) -> tuple[str | None, list[str]]:
    """Copies what travels with the weights; returns the tokenizer class (`None` without tokenizer) and notes."""
    if checkpoint.gguf_file:
        if checkpoint.tokenizer is not None:
            copy_files(checkpoint.tokenizer, folder)
            return pin_class(load_tokenizer(checkpoint.tokenizer), folder)
        if not any(key in checkpoint.reader.file.metadata for key in (MODEL, "tokenizer.ggml.tokens")):
            return None, ["The GGUF file has no tokenizer, so neither has the result."]
        source = load_gguf_tokenizer(checkpoint)
        source.save_pretrained(folder)
        return pin_class(source, folder)
    copy_files(checkpoint.folder, folder)
    carry_generation_settings(checkpoint.raw_config, folder / GENERATION_CONFIG)
    if not any(any(folder.glob(pattern)) for pattern in VOCABULARIES):
        return None, ["The source has no tokenizer, so neither has the result."]
    return pin_class(load_tokenizer(checkpoint.folder), folder)


def copy_files(source: Path, folder: Path, patterns: tuple[str, ...] = CARRIED) -> None:
    """The tokenizer and what else travels with the weights, byte for byte."""
    for pattern in patterns:
        for path in sorted(source.glob(pattern)):
            target = folder / path.relative_to(source)
            target.parent.mkdir(exist_ok=True)
            shutil.copyfile(path, target)


def carry_generation_settings(raw_config: dict, path: Path) -> None:
    """
    Checks a generation_config.json that was copied; writes one where the source keeps the settings in config.json.

    The library reads them there when there is no such file, but the result's config.json does not repeat them.
    """
    if path.exists():
        read_json(path)
        return
    names = set(GenerationConfig._get_default_generation_params()) & raw_config.keys()
    if settings := {name: raw_config[name] for name in sorted(names) if raw_config[name] is not None}:
        ids = {name: raw_config[name] for name in TOKEN_IDS if raw_config.get(name) is not None}
        path.write_text(json.dumps(ids | settings, indent=2) + "\n", encoding="utf-8")


def load_tokenizer(folder: Path, name: str | None = None, **options):
    """
    What AutoTokenizer makes of `folder`, called `name` in errors.

    Raises ValueError for files that cannot be read, ImportError when a package is missing for them.
    """
    if (folder / "config.json").is_file() and has_mark(folder / "config.json"):
        options["config"] = library_config(folder)
    try:
        return AutoTokenizer.from_pretrained(folder, trust_remote_code=False, **options)
    except Exception as error:  # a damaged file surfaces as almost any type
        refuse_unreadable(folder)
        raise ValueError(f"The tokenizer of {name or folder} cannot be loaded: {one_line(error)}") from error


def load_gguf_tokenizer(checkpoint, name: str | None = None):
    """The tokenizer that a GGUF file describes, with llama.cpp's ids; ValueError where that cannot be known."""
    metadata = checkpoint.reader.file.metadata
    path = checkpoint.reader.file.path
    options = loading_options(metadata, path)
    return complete(load_tokenizer(checkpoint.folder, name, **options), metadata, path)


def with_tokenizer(checkpoint, folder: Path | None):
    """
    The checkpoint of a GGUF file with the original tokenizer, from `folder`, in place of the file's own.

    ValueError for another kind of source, and for a tokenizer whose tokens are not those of the file.
    """
    if folder is None:
        return checkpoint
    if checkpoint.gguf_file is None:
        raise ValueError(f"tokenizer={str(folder)!r} is for a .gguf source; the tokenizer of a folder lies in it.")
    if not any(any(folder.glob(pattern)) for pattern in VOCABULARIES):
        raise ValueError(f"{folder} has no tokenizer: name a folder with tokenizer.json or the like.")
    tokenizer = load_tokenizer(folder)
    check_against_file(tokenizer, str(folder), checkpoint)
    return replace(checkpoint, tokenizer=folder)


def check_against_file(tokenizer, name: str, checkpoint) -> None:
    """ValueError unless `tokenizer` has the tokens that a GGUF file lists."""
    file = checkpoint.reader.file
    tokens = stated_tokens(file.path)
    if tokens is None:  # a file without tokenizer; the size of its embedding is all there is
        tokens = tokenizer.convert_ids_to_tokens(range(min(len(tokenizer), checkpoint.raw_config["vocab_size"])))
    check_vocabulary(tokenizer, name, tokens, file.metadata.get("tokenizer.ggml.token_type", ()))


def refuse_unreadable(folder: Path) -> None:
    """Raises for reasons that the library's own messages do not give."""
    for path in sorted(folder.glob("*.json")):
        if path.name != "config.json" and has_mark(path):
            raise ValueError(
                f"{path} begins with a byte order mark, which the library does not read: save it as UTF-8 without one."
            )
    models = [path.name for path in folder.glob("*.model")]  # the library goes on to try them as files of tiktoken
    available = {"sentencepiece": is_sentencepiece_available(), "protobuf": is_protobuf_available()}
    missing = [package for package, there in available.items() if not there]
    if models and missing and not (folder / "tokenizer.json").is_file():
        raise ImportError(
            f"{folder / models[0]} is a SentencePiece model, which Transformers reads with {' and '.join(missing)}: "
            f"pip install {' '.join(missing)}."
        )


def pin_class(source, folder: Path) -> tuple[str, list[str]]:
    """Pins the first class under which the files in `folder` give the expected ids, and names it."""
    expected, notes = expected_ids(source, folder)
    path = folder / TOKENIZER_CONFIG
    settings = read_json(path) if path.exists() else {}
    declared = settings.get("tokenizer_class")
    candidates = [name for name in dict.fromkeys([declared, GENERIC_CLASS, type(source).__name__]) if name]
    for candidate in candidates:
        if candidate != declared:
            pinned = json.dumps(settings | {"tokenizer_class": candidate}, indent=2, ensure_ascii=False)
            path.write_text(pinned + "\n", encoding="utf-8")
        try:
            found = ids_of(load_tokenizer(folder))
        except ValueError:  # a class that cannot read these files is not the one
            continue
        if found == expected:
            if declared and candidate != declared:
                notes.append(f"{declared} gives other ids for a gated_llama; tokenizer_class is now {candidate}.")
            return candidate, notes
    raise ValueError(
        f"None of the tokenizer classes {', '.join(candidates)} reproduces the source's token ids from its files: "
        "save the tokenizer anew with save_pretrained in a copy of the source."
    )


def expected_ids(source, folder: Path) -> tuple[list[Ids], list[str]]:
    """
    Ids of the probes, and a note when the source's own class does not give them.

    tokenizer.json, where there is one, is what the model was trained with, and some classes split text otherwise.
    Special tokens are what the source's class puts around the text.
    """
    found = ids_of(source)
    path = folder / "tokenizer.json"
    if not path.exists():
        return found, []
    raw = Tokenizer.from_file(str(path))
    expected = []
    for text, ids in zip(PROBES, found, strict=True):
        plain = raw.encode(text, add_special_tokens=False).ids
        before = next((n for n in range(len(ids.full)) if ids.full[n:][: len(ids.plain)] == ids.plain), 0)
        expected.append(Ids(plain, ids.full[:before] + plain + ids.full[before + len(ids.plain) :]))
    differing = [text for text, own, ids in zip(PROBES, found, expected, strict=True) if own != ids]
    if not differing:
        return expected, []
    note = (
        f"AutoTokenizer makes {type(source).__name__} of the source, which splits {differing[0]!r} otherwise than its "
        "tokenizer.json; the result follows tokenizer.json."
    )
    return expected, [note]


def ids_of(tokenizer) -> list[Ids]:
    # verbose=False: no warning that a probe is longer than model_max_length
    encode = partial(tokenizer.encode, verbose=False)
    return [Ids(*(encode(text, add_special_tokens=special) for special in (False, True))) for text in PROBES]
