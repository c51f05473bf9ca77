"""Checkpoints as models: what `from_pretrained` makes of a Hub id, a folder or a GGUF file, with nothing invented."""

import contextlib
import re
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedTokenizerBase

from .config_file import library_config
from .gguf_vocabulary import unreadable
from .imports import PAPER_FLAGS
from .opening import Checkpoint, open_checkpoint
from .source_rotary import honour_attn_factor
from .tensor_files import DTYPES, one_line
from .tokenizer import VOCABULARIES, carry_files, load_gguf_tokenizer, load_tokenizer


# What other code calls its gates, inside an attention module.
GATE_NAMES = re.compile(r"(attn|attention)\w*\.(w_g|g_proj|g_param|gate_proj|attn_gate|gate)(\.|$)")
# What the library's GGUF loader takes from its defaults: without a tokenizer, and for Qwen3.
GGUF_SIZES = ("vocab_size", "head_dim")
UNKNOWN_CLASS = re.compile(r"Unrecognized configuration class <class '(?:\w+\.)*(\w+)'>")


@dataclass(frozen=True)
class Loadable:
    """A checkpoint under the name it was asked for, read by the library's own loaders and not by the converter's."""

    name: str
    checkpoint: Checkpoint

    @classmethod
    def open(
        cls, source: "str | Path | Loadable", revision: str | None = None, *, quantised: bool = False
    ) -> "Loadable":
        """
        ValueError when there is no checkpoint, or a damaged one. What is open already is returned.

        quantised: also one whose weights only its quantiser reads, for those who run models and read no weights.
        """
        if isinstance(source, Loadable):
            return source
        return cls(str(source), open_checkpoint(source, revision, quantised=quantised))

    def __str__(self) -> str:
        return self.name

    @property
    def arguments(self) -> dict[str, Any]:
        """For any `from_pretrained`; code that a checkpoint brings is never run."""
        gguf = {"gguf_file": self.checkpoint.gguf_file} if self.checkpoint.gguf_file else {}
        return {"pretrained_model_name_or_path": str(self.checkpoint.folder), "trust_remote_code": False, **gguf}

    @cached_property
    def config(self) -> PreTrainedConfig:
        """As the library reads it, but for what it does not understand (see `library_config`, `with_amplitude`)."""
        gguf_file = self.checkpoint.gguf_file
        config = honour_attn_factor(library_config(self.checkpoint.folder, gguf_file=gguf_file))
        if gguf_file:
            config.update({name: self.checkpoint.raw_config[name] for name in GGUF_SIZES})
        return config

    @property
    def stored_dtype(self) -> str:
        """The dtype of most parameters but quantised ones; float32 for GGUF, which is de-quantised."""
        sizes: dict[torch.dtype, int] = {}
        for info in self.checkpoint.reader.tensors.values():
            if info.dtype in DTYPES.values():
                sizes[info.dtype] = sizes.get(info.dtype, 0) + torch.Size(info.shape).numel()
        return str(max(sizes, key=sizes.get)).removeprefix("torch.")

    def rounding(self, dtype: torch.dtype) -> torch.dtype:
        """
        The dtype to read this model in for a copy of it in `dtype`.

        A model that is in `dtype` already is read as it is: its few float32 tensors, gains of zero-centred norms that
        an import kept, would lose digits that the copy may be able to store.
        """
        return torch.float32 if self.stored_dtype == str(dtype).removeprefix("torch.") else dtype

    @property
    def has_tokenizer(self) -> bool:
        if self.checkpoint.gguf_file:
            return "tokenizer.ggml.tokens" in self.checkpoint.reader.file.metadata
        return any(any(self.checkpoint.folder.glob(pattern)) for pattern in VOCABULARIES)

    @property
    def guessed_tokenizer(self) -> str | None:
        """Why the tokenizer of a GGUF file cannot be rebuilt with its ids; `None` for all others."""
        return unreadable(self.checkpoint.reader.file.metadata) if self.checkpoint.gguf_file else None

    def load_tokenizer(self) -> PreTrainedTokenizerBase:
        if self.checkpoint.gguf_file:
            return load_gguf_tokenizer(self.checkpoint, str(self))
        return load_tokenizer(self.checkpoint.folder, name=str(self))

    def carried_tokenizer(self) -> PreTrainedTokenizerBase:
        """As a conversion delivers it: what tokenizer.json says, where AutoTokenizer's class says otherwise."""
        with tempfile.TemporaryDirectory() as folder:
            carry_files(self.checkpoint, Path(folder))
            return load_tokenizer(Path(folder))

    def raw_tokenizer(self) -> Tokenizer | None:
        """tokenizer.json as it is written, without what a tokenizer class of the library makes of it."""
        path = self.checkpoint.folder / "tokenizer.json"
        return Tokenizer.from_file(str(path)) if path.is_file() and not self.checkpoint.gguf_file else None

    def load_model(self, dtype: str = "auto", **options) -> torch.nn.Module:
        """The causal language model in eval mode; ValueError if a weight is absent or of another shape."""
        if any(self.checkpoint.raw_config.get(flag) for flag in PAPER_FLAGS):
            raise ValueError(
                f"{self} is in the format of the paper's release, for which Transformers has no class: convert it "
                "with `gated-llama convert`; `gated-llama export --target paper` gives its tensors back bit for bit."
            )
        with plain_errors(str(self), self.checkpoint.quantiser):
            model, info = AutoModelForCausalLM.from_pretrained(
                **self.arguments, config=self.config, dtype=dtype, output_loading_info=True, **options
            )
        refuse_lost_gates(str(self), info)
        if absent := sorted(info["missing_keys"]):
            raise ValueError(f"{self} has no weights for {len(absent)} tensors, the first {absent[0]!r}.")
        return model.eval()


@contextlib.contextmanager
def plain_errors(name: str, quantiser: str | None = None) -> Iterator[None]:
    """
    ValueError in one line for the library's errors on loading the model `name`; ImportError where its quantiser is not
    installed.
    """
    try:
        yield
    except ImportError as error:
        if quantiser is None:
            raise
        raise ImportError(
            f"{name} is quantised by {quantiser}, which runs it and is not installed: {one_line(error)}."
        ) from error
    except RuntimeError as error:
        if "ignore_mismatched_sizes" in str(error):  # the library's own report is not shown here
            raise ValueError(
                f"{name}: tensors do not have the shapes that its config.json calls for; "
                f"`gated-llama inspect {name}` names them."
            ) from error
        raise ValueError(f"{name} cannot be loaded: {one_line(error)}") from error
    except ValueError as error:
        if kind := UNKNOWN_CLASS.search(str(error)):  # the library goes on to name every class it has
            raise ValueError(
                f"{name} cannot be loaded: AutoModelForCausalLM has no class for {kind[1]}. Engines read such a "
                "folder; `gated-llama convert` takes it back."
            ) from error
        raise


def refuse_lost_gates(name: str, info: dict) -> None:
    """ValueError where loading left gates out. info: what `output_loading_info` gives."""
    if gates := [key for key in info["unexpected_keys"] if GATE_NAMES.search(key)]:
        raise ValueError(
            f"{name} holds {len(gates)} gate tensors that its architecture has no place for, the first "
            f"{min(gates)!r}: loaded without them it would be another model."
        )
