"""A folder's config.json as the library reads it."""

from codecs import BOM_UTF8
from pathlib import Path

from huggingface_hub.errors import StrictDataclassError
from transformers import AutoConfig, PreTrainedConfig

from .tensor_files import one_line, read_json


def has_mark(path: Path) -> bool:
    """Whether a file begins with a byte order mark, as some editors leave one; the library reads no such JSON."""
    with open(path, "rb") as file:
        return file.read(len(BOM_UTF8)) == BOM_UTF8


def library_config(folder: Path, **options) -> PreTrainedConfig:
    """
    What AutoConfig makes of `folder`, also where its config.json begins with a byte order mark.

    Raises ValueError in one line for what the library refuses in its own ways.
    """
    path = folder / "config.json"
    try:
        if not options.get("gguf_file") and path.is_file() and has_mark(path):
            return AutoConfig.for_model(**read_json(path))
        return AutoConfig.from_pretrained(folder, trust_remote_code=False, **options)
    except (StrictDataclassError, AttributeError, TypeError, KeyError) as error:
        raise ValueError(f"{path} is not valid: {one_line(error.__cause__ or error)}") from error
