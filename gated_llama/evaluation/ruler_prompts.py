"""RULER's prompts: made by the harness for a tokenizer and a length, refused where none fits, kept between runs."""

import contextlib
import functools
import hashlib
import io
import json
import os
import random
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from importlib.metadata import version
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
from datasets import Dataset
from huggingface_hub import cached_assets_path
from lm_eval.tasks import TaskManager
from lm_eval.tasks._yaml_loader import _import_fun_from_str

from ..convert.tensor_files import one_line


# Frequent words: the fewest from which the third most frequent word of a coded text is drawn once.
FEWEST_CODED_WORDS = 27
DRAWS = 8  # coded texts to measure, whose words are random


@dataclass(frozen=True)
class Prompts:
    """
    Documents of one RULER task, in place of its generator (`custom_dataset`), whose import sorts six million words.

    They depend on task, length, content of the tokenizer, seeds and versions alone, not on what was made before them,
    and lie in the assets of the Hub's cache (`HF_ASSETS_CACHE`, or `HF_HOME`).

    task: its name. generator: where the harness has its function, as FILE.NAME. seeds: of `random` and `numpy.random`.
    limit: how many documents of each length are kept, None for all.
    """

    task: str
    generator: str
    seeds: tuple[int, int]
    limit: int | None

    def __call__(self, **metadata) -> dict[str, Dataset]:
        """
        The documents for `max_seq_lengths` and the tokenizer of a task's metadata.

        Raises ValueError for a length that the smallest prompt does not fit.
        """
        from lm_eval.tasks.ruler.common_utils import DEFAULT_SEQ_LENGTHS, resolve_tokenizer_name

        if not (name := resolve_tokenizer_name(metadata)):
            raise ValueError(f"{self.task} fits its prompts to a tokenizer: name one as `tokenizer` in --metadata.")
        lengths = metadata.get("max_seq_lengths", DEFAULT_SEQ_LENGTHS)
        return {"test": Dataset.from_list([doc for length in lengths for doc in self._documents(name, length)])}

    def _documents(self, tokenizer: str, length: int) -> list[dict[str, Any]]:
        path = self.path(tokenizer, length)
        if not path.is_file():
            with contextlib.redirect_stdout(io.StringIO()):  # the generators report each step
                documents = self._generate(tokenizer, length)
            partial = path.with_suffix(f".{os.getpid()}.partial")
            partial.write_text(json.dumps(documents), encoding="utf-8")
            partial.replace(path)
        return json.loads(path.read_text(encoding="utf-8"))

    def path(self, tokenizer: str, length: int) -> Path:
        """The file of one length."""
        depends = (self.generator.rpartition("/")[2], length, tokenizer_digest(tokenizer), self.seeds, self.limit)
        depends += tuple(map(version, ("lm_eval", "wonderwords")))
        digest = hashlib.sha256(json.dumps(depends).encode()).hexdigest()[:16]
        return cached_assets_path("gated_llama", "ruler", self.task) / f"{length}-{digest}.json"

    def _generate(self, tokenizer: str, length: int) -> list[dict[str, Any]]:
        generate = _import_fun_from_str(self.generator)
        module = sys.modules[generate.__module__]
        seed = functools.partial(seed_generators, *self.seeds, getattr(module, "RNG", None))
        seed()
        measure = MEASURES.get(generate.__module__.rpartition(".")[2], lambda *_: ())
        for what, tokens, room in measure(module, module.get_tokenizer(tokenizer), length, seed):
            if tokens > room:
                advice = "choose longer lengths" if room == length else "leave the task out"
                raise ValueError(
                    f"{self.task} does not fit a length of {length} tokens: its {what} takes {tokens} with the "
                    f"tokenizer of {tokenizer} and has room for {room}: {advice}."
                )
        seed()
        try:
            return generate(tokenizer=tokenizer, max_seq_lengths=[length])["test"].to_list()[: self.limit]
        except ValueError as error:
            raise ValueError(f"{self.task} at a length of {length} tokens: {one_line(error)}") from error


def seed_generators(seed: int | None, numpy_seed: int | None, own: random.Random | None = None) -> None:
    """Seeds what synthetic tasks draw from: the global generators, and one of their module's own."""
    if seed is not None:
        random.seed(seed)
        if own is not None:
            own.seed(seed)
    if numpy_seed is not None:
        np.random.seed(numpy_seed)


@functools.cache
def tokenizer_digest(name: str) -> str:
    """Digest of the files that the tokenizer saves: equal for copies of one, in whatever folder."""
    from lm_eval.tasks.ruler.common_utils import get_tokenizer

    digest = hashlib.sha256()
    with tempfile.TemporaryDirectory() as folder:
        get_tokenizer(name).save_pretrained(folder)
        for path in sorted(Path(folder).rglob("*")):
            if path.is_file():
                digest.update(path.name.encode() + path.read_bytes())
    return digest.hexdigest()


def keep_prompts(manager: TaskManager, seeds: Sequence[int | None], limit: float | None) -> None:
    """Puts `Prompts` in place of the generators of the harness's RULER tasks."""
    kept = int(limit) if limit and limit >= 1 else None
    for name, entry in manager.task_index.items():
        generator = (entry.cfg or {}).get("custom_dataset")
        if isinstance(generator, str) and Path(generator).parent.name == "ruler":
            prompts = Prompts(name, generator, (seeds[0] or 0, seeds[1] or 0), kept)
            config = _with_functions({**entry.cfg, "custom_dataset": prompts})
            manager.task_index[name] = replace(entry, yaml_path=None, cfg=config)


def _with_functions(value: Any) -> Any:
    """A part of a task's configuration as the index has it, where a function is still FILE.NAME, with functions."""
    if isinstance(value, dict):
        return {key: _with_functions(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_with_functions(item) for item in value]
    is_function = isinstance(value, str) and value.startswith("/") and Path(value).with_suffix(".py").is_file()
    return _import_fun_from_str(value) if is_function else value


# What the generators must be able to fit, as (what, tokens, room), in the order in which they look: those of common
# words and variable tracking search for ever, or make prompts of nothing, where they cannot. Seeded alike, they draw
# first what is measured here. The others say themselves that nothing fits.
Measure = Callable[[ModuleType, Any, int, Callable[[], None]], Iterator[tuple[str, int, int]]]


def _common_words(module: ModuleType, tokenizer, length: int, seed: Callable[[], None]) -> Iterator:
    example, text, answer = module.generate_input_output(10, length)
    words = " ".join(f"{place}. {word}" for place, word in enumerate(answer, 1))
    tokens = len(tokenizer(f"{example}\n{text} {words}").input_ids) + module.CONFIG["tokens_to_generate"]
    yield "smallest prompt", tokens, length


def _variable_tracking(module: ModuleType, tokenizer, length: int, seed: Callable[[], None]) -> Iterator:
    answer_tokens, room = module.CONFIG["variable_tracking"]["tokens_to_generate"], 500
    example, answer = module.generate_input_output(5, 1, 4, is_icl=True)
    yield "example", len(tokenizer(f"{example} {answer}").input_ids) + answer_tokens, room
    seed()
    (shot,) = module.sys_vartrack_w_noise_random(tokenizer, num_samples=1, max_seq_length=room, incremental=5)
    text, answer = module.generate_input_output(10, 1, 4)
    parts = (f"{shot['input']} {' '.join(shot['outputs'])}\n\n", f"{text} {answer}")
    tokens = sum(len(tokenizer(part).input_ids) for part in parts) + answer_tokens
    yield "smallest prompt", tokens, length


def _frequent_words(module: ModuleType, tokenizer, length: int, seed: Callable[[], None]) -> Iterator:
    words = FEWEST_CODED_WORDS + length // 32  # it shortens texts by so many at a time
    vocabulary = max(4, length // 50)  # its first word is noise, and the next three are asked for
    draws = (module.generate_input_output(sys.maxsize, tokenizer, words, vocab_size=vocabulary) for _ in range(DRAWS))
    tokens = max(len(tokenizer(text).input_ids) for text, *_ in draws)
    yield "smallest prompt", max(tokens, 50 * vocabulary), length


MEASURES: dict[str, Measure] = {
    "cwe_utils": _common_words,
    "vt_utils": _variable_tracking,
    "fwe_utils": _frequent_words,
}
