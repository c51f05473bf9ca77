"""The model class `gated-llama` of lm-evaluation-harness: its `hf`, with the start of every request under control."""

import copy
import logging
import math
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any, Literal

import torch
from lm_eval.api.instance import Instance
from lm_eval.api.registry import register_model
from lm_eval.api.task import Task
from lm_eval.models.huggingface import HFLM
from lm_eval.models.utils import normalize_gen_kwargs
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window
from tqdm import tqdm
from transformers import AutoConfig, AutoModelForCausalLM

from ..convert.extend_context import context_length
from ..convert.loading import Loadable, plain_errors, refuse_lost_gates
from ..convert.source_rotary import honour_attn_factor
from ..diagnostics.probes import eval_mode
from .probes import COLLECTORS, TaskProbes


logger = logging.getLogger(__name__)

BOS_POLICIES = ("auto", "none", "always")
ON_TRUNCATION = ("error", "count")

# Options of `HFLM` that mean something beside a loaded model; all others say what to load and how.
BESIDE_A_MODEL = (
    "backend",
    "tokenizer",
    "truncation",
    "logits_cache",
    "max_length",
    "softmax_dtype",
    "mixed_precision_dtype",
    "batch_size",
    "max_batch_size",
    "add_bos_token",
    "prefix_token_id",
    "think_end_token",
    "enable_thinking",
    "chat_template_args",
)
OF_A_NAMED_TOKENIZER = ("use_fast_tokenizer", "trust_remote_code")


class TruncationError(ValueError):
    """A prompt is longer than the model's context allows."""


class WholeModel:
    """
    AutoConfig,
    AutoModelForCausalLM, for checkpoints that have all weights and no gates besides: the library makes up what is not
    there, and leaves out what it has no place for.
    """

    @staticmethod
    def from_pretrained(name: str, **options) -> torch.nn.Module:
        where = ("revision", "trust_remote_code", "gguf_file", "subfolder")
        config = AutoConfig.from_pretrained(name, **{key: options[key] for key in where if key in options})
        if "attn_factor" in (getattr(config, "rope_parameters", None) or {}):
            options["config"] = honour_attn_factor(config)
        with plain_errors(name):
            model, info = AutoModelForCausalLM.from_pretrained(name, output_loading_info=True, **options)
        refuse_lost_gates(name, info)
        if absent := sorted(info["missing_keys"]):
            raise ValueError(
                f"{name} has no weights for {len(absent)} tensors of {type(model).__name__}, the first {absent[0]!r}, "
                "so its scores would be those of random ones: evaluate a checkpoint with a language-model head, as "
                "AutoModelForCausalLM saves it."
            )
        return model


@register_model("gated-llama")
class GatedLlamaLM(HFLM):
    """
    Runs any causal language model of Transformers, gated or not, as the harness's `hf` does, and in addition

    - fixes how requests begin (`bos`), never with two beginning-of-sequence tokens;
    - refuses, or counts, prompts that do not fit instead of cutting them with a warning;
    - measures gates and sinks on the very tokens that are scored (`probes`).

    Tasks are run one after the other, so that batches hold one task and a measurement belongs to one task; with
    several processes (accelerate) requests are run as they come. Scores at batch size 1 are those of `hf`, and for a
    single task at any batch size.

    Args:
        pretrained: Hub id, folder, .gguf file, or a loaded model (then with `tokenizer`), which is measured as in
            `eval()` and left as it is, the mode of each of its modules included, and so is a loaded tokenizer.
        bos: `"auto"`, what tokenizer and harness do; `"none"`, no beginning-of-sequence token anywhere (perplexity
            then starts at the second token, and per word or byte comes out lower for it); `"always"`, exactly one
            before every request; or a token of the vocabulary, which then is that one. An empty context still has
            the token to condition on, and a token that a chat template uses as markup stays.
        probes: names out of `"gates"` and `"sink"`; a list, or one string such as `"gates,sink"`.
        on_truncation: `"error"`, or `"count"`: cut as the harness does and report how many prompts were.
        options: as for `HFLM`.

    Raises ValueError for options that are not valid, for models without a language-model head, and for options beside
    a loaded model that only say how to load one.
    """

    def __init__(
        self,
        pretrained: Any,
        *,
        bos: str = "auto",
        probes: str | Iterable[str] | None = None,
        on_truncation: Literal["error", "count"] = "error",
        **options,
    ):
        if on_truncation not in ON_TRUNCATION:
            raise ValueError(f"on_truncation={on_truncation!r} is not one of {', '.join(ON_TRUNCATION)}.")
        if bos != "auto" and options.get("add_bos_token") is not None:
            raise ValueError(f"bos={bos!r} and add_bos_token={options['add_bos_token']} contradict: give one of them.")
        options.setdefault("backend", "causal")  # the harness knows only the types that Transformers ships
        if isinstance(pretrained, torch.nn.Module):
            options["tokenizer"] = tokenizer_beside(pretrained, options)
            with eval_mode(pretrained):
                super().__init__(pretrained, **options)
        else:
            if str(pretrained).endswith(".gguf"):
                if options.get("tokenizer") is None:  # the library guesses how some files split text
                    options["tokenizer"] = Loadable.open(pretrained).load_tokenizer()
                options["gguf_file"] = Path(pretrained).name
                pretrained = Path(pretrained).parent
            super().__init__(str(pretrained), **options)
        if hasattr(self, "accelerator") and self.world_size == 1:  # HFLM counts processes only where it sees GPUs
            self._rank, self._world_size = self.accelerator.process_index, self.accelerator.num_processes
        if self.model.get_output_embeddings() is None:
            raise ValueError(
                f"{type(self.model).__name__} has no language-model head, so it scores nothing: "
                "load it with AutoModelForCausalLM."
            )
        # The tokenizer's warning about long texts: windows and the check of `on_truncation` take care of those.
        self.tokenizer.deprecation_warnings["sequence-length-is-longer-than-the-specified-maximum"] = True
        self.bos = self._choose_bos(bos)
        self.on_truncation = on_truncation
        self.task = ""
        self._batch_size_at: dict[int, int] = {}
        self.probes: TaskProbes | None = None
        self.attach_probes(probe_names(probes))

    def attach_probes(self, names: Sequence[str]) -> None:
        """Measures these from now on. Raises ValueError for what the model does not have, or in several processes."""
        if names and self.world_size > 1:
            raise ValueError("Probes measure in one process only: run without accelerate, or without --probes.")
        self.probes = TaskProbes(self.model, names) if names else None

    def _choose_bos(self, bos: str) -> str:
        if bos in BOS_POLICIES:
            return bos
        ids = self.tokenizer.encode(bos, add_special_tokens=False)
        if len(ids) != 1:
            raise ValueError(
                f"bos={bos!r} is neither a policy ({', '.join(BOS_POLICIES)}) nor one token of the vocabulary: "
                f"it encodes to {len(ids)} tokens."
            )
        self.custom_prefix_token_id = ids[0]
        return "always"

    @property
    def max_length(self) -> int:
        """Tokens of context: `max_length` if it was given, else what the configuration allows, YaRN included."""
        return self._max_length or context_length(self.model.config) or super().max_length

    def _create_model(self, *arguments, **options):
        if self.AUTO_MODEL_CLASS is AutoModelForCausalLM:
            self.AUTO_MODEL_CLASS = WholeModel
        super()._create_model(*arguments, **options)

    # Tokens of a request

    def begin(self, ids: list[int]) -> list[int]:
        """Token ids of a text with the beginning that the policy wants: none, or one, but never two."""
        added, body = self.split_bos(ids)
        wanted = {"none": [], "always": [self.prefix_token_id]}.get(self.bos, added[-1:])
        return body if body[:1] == wanted else wanted + body

    def split_bos(self, ids: list[int]) -> tuple[list[int], list[int]]:
        """
        Beginning-of-sequence tokens in front of a text, and the text.

        One that comes again later is markup of a chat template (`<|im_start|>`) and belongs to the text.
        """
        beginnings = {self.prefix_token_id, self.tokenizer.bos_token_id}
        count = next((i for i, token in enumerate(ids) if token not in beginnings), len(ids))
        if count and ids[count - 1] in ids[count:]:
            count -= 1
        return ids[:count], ids[count:]

    def tok_encode(self, string, add_special_tokens=None, left_truncate_len=None, **options) -> list[int]:
        ours = add_special_tokens is None and self.bos != "auto"
        ids = super().tok_encode(string, False if ours else add_special_tokens, **options)
        if add_special_tokens is not False:
            ids = self.begin(ids)
        return ids[-left_truncate_len:] if left_truncate_len else ids

    def tok_batch_encode(self, strings, padding_side="left", left_truncate_len=None, truncation=False):
        rows = [self.tok_encode(string, left_truncate_len=left_truncate_len) for string in strings]
        batch = self.tokenizer.pad({"input_ids": rows}, padding_side=padding_side, return_tensors="pt")
        return batch["input_ids"], batch["attention_mask"]

    def rolling_ids(self, text: str) -> tuple[int | None, list[int]]:
        """The token that perplexity conditions on first, and the tokens that it scores."""
        _, body = self.split_bos(self.tok_encode(text))
        if self.bos != "none":
            return self.prefix_token_id, body
        return (body[0], body[1:]) if body else (None, [])

    def request_ids(self, request: Instance) -> list[int]:
        """All token ids of a request, as the model sees them (before windows or truncation)."""
        if request.request_type == "loglikelihood_rolling":
            prefix, tokens = self.rolling_ids(request.args[0])
            return [] if prefix is None else [prefix, *tokens]
        if request.request_type == "generate_until":
            return self.tok_encode(request.args[0])
        context, continuation = request.args
        if context:
            return [token for part in self._encode_pair(context, continuation) for token in part]
        ids = self.tok_encode(continuation, add_special_tokens=False)
        return ids if ids[0] == self.prefix_token_id else [self.prefix_token_id, *ids]

    # Requests, task by task

    def loglikelihood(self, requests: list[Instance], disable_tqdm: bool = False) -> list[tuple[float, bool]]:
        return self._by_task(super().loglikelihood, requests, disable_tqdm)

    def loglikelihood_rolling(self, requests: list[Instance], disable_tqdm: bool = False) -> list[float]:
        return self._by_task(self._score_documents, requests, disable_tqdm)

    def generate_until(self, requests: list[Instance], disable_tqdm: bool = False) -> list[str]:
        if not self.model.can_generate():
            raise ValueError(
                f"{type(self.model).__name__} cannot generate, which {requests[0].task_name} needs: "
                "load it with AutoModelForCausalLM, or choose tasks that score given answers."
            )
        return self._by_task(self._generate, requests, disable_tqdm)

    def _by_task(self, run: Callable, requests: list[Instance], disable_tqdm: bool) -> list:
        groups: dict[str, list[int]] = {}
        for index, request in enumerate(requests):
            groups.setdefault(request.task_name if self.world_size == 1 else "", []).append(index)
        answers = [None] * len(requests)
        for self.task, indices in groups.items():
            group = [requests[index] for index in indices]
            measured = self.probes.on(self.task, len(group)) if self.probes else nullcontext()
            with measured, eval_mode(self.model):  # a loaded model may go on being trained between evaluations
                for index, answer in zip(indices, run(group, disable_tqdm=disable_tqdm), strict=True):
                    answers[index] = answer
        return answers

    def _score_documents(self, requests: list[Instance], disable_tqdm: bool = False) -> list[float]:
        """As in HFLM, but each document reaches the cache when its last window is scored, so a stop loses none."""
        windows = [(index, window) for index, request in enumerate(requests) for window in self._windows(request)]
        pending = Counter(index for index, _ in windows)
        totals = [0.0] * len(requests)
        size = self._detect_batch_size() if self.batch_size == "auto" else self.batch_size
        padding = self._padding(len(windows)) * windows[:1]
        bar = tqdm(total=len(windows), desc="Scoring windows", disable=disable_tqdm or self.rank != 0)
        for start in range(0, len(windows) + len(padding), size):
            batch = (windows + padding)[start : start + size]
            scores = self._loglikelihood_tokens([w for _, w in batch], disable_tqdm=True, override_bs=len(batch))
            real = max(0, len(windows) - start)  # what follows is padding, whose scores count for nothing
            for (index, _), (score, _) in zip(batch[:real], scores, strict=False):
                totals[index] += score
                pending[index] -= 1
                if not pending[index]:
                    self.cache_hook.add_partial("loglikelihood_rolling", requests[index].args, totals[index])
            bar.update(len(batch))
        bar.close()
        return totals

    def _windows(self, request: Instance) -> list[tuple[None, list[int], list[int]]]:
        prefix, tokens = self.rolling_ids(request.args[0])
        windows = get_rolling_token_windows(tokens, prefix, self.max_length, context_len=1)
        return [(None, *make_disjoint_window(window)) for window in windows]

    def _padding(self, windows: int) -> int:
        """Windows to add on this process so that all run the same number (sharded models wait for each other)."""
        if self.world_size == 1:
            return 0
        counts = self.all_gather(torch.tensor([windows], device=self.device)).tolist()
        return max(counts) - windows

    def _generate(self, requests: list[Instance], disable_tqdm: bool = False) -> list[str]:
        self._check_fit([(len(self.request_ids(request)), self.room(request)) for request in requests])
        return super().generate_until(requests, disable_tqdm=disable_tqdm)

    def room(self, request: Instance) -> float:
        """Tokens that a request may have without being cut; documents of perplexity tasks are read in windows."""
        if request.request_type == "loglikelihood_rolling":
            return math.inf
        if request.request_type == "loglikelihood":
            return self.max_length + 1  # the last one is predicted, never read
        room = self.max_length - normalize_gen_kwargs(request.args[1], self.max_gen_toks)["max_gen_toks"]
        if room < 1:
            raise ValueError(
                f"{request.task_name} generates up to {self.max_length - room} tokens, which leaves no room for a "
                f"prompt in a context of {self.max_length}: pass --gen_kwargs max_gen_toks=N, or extend the context."
            )
        return room

    def count_truncated(self, tasks: dict[str, Task]) -> dict[str, int]:
        """
        Requests of each task that are cut, whether they were answered now or came from a cache.

        Every process must call it: each holds a share of the requests.
        """
        if self.on_truncation == "error":
            return {}
        counts = [
            sum(len(self.request_ids(request)) > self.room(request) for request in task.instances)
            for task in tasks.values()
        ]
        if self.world_size > 1:
            shares = self.all_gather(torch.tensor(counts, device=self.device))
            counts = shares.view(self.world_size, -1).sum(0).tolist()
        return {name: count for name, count in zip(tasks, counts, strict=True) if count}

    def _loglikelihood_tokens(self, requests, disable_tqdm=False, override_bs=None):
        self._check_fit(
            [(len(context) + len(continuation), self.max_length + 1) for _, context, continuation in requests]
        )
        longest = max((len(continuation) for _, _, continuation in requests), default=0)
        if longest > self.max_length:
            raise TruncationError(
                f"An answer of {self.task or 'these tasks'} has {longest} tokens and the context {self.max_length}: "
                "it cannot be scored, however its prompt is cut. Extend the context (gated-llama extend-context)."
            )
        if self.probes:
            self.probes.expect(
                (context + continuation)[-(self.max_length + 1) :][:-1] for _, context, continuation in requests
            )
        return super()._loglikelihood_tokens(requests, disable_tqdm=disable_tqdm, override_bs=override_bs)

    def _check_fit(self, lengths: Sequence[tuple[int, int]]) -> None:
        """lengths: tokens and room of each request. TruncationError where one does not fit, unless counted."""
        over = [(tokens, room) for tokens, room in lengths if tokens > room]
        if over and self.on_truncation == "error":
            tokens, room = max(over, key=lambda pair: pair[0] - pair[1])
            raise TruncationError(
                f"{len(over)} of {len(lengths)} prompts of {self.task or 'these tasks'} do not fit: up to {tokens} "
                f"tokens where {room} have room (context {self.max_length}). Use fewer shots, extend the context "
                "(gated-llama extend-context), or let them be cut and counted: --model_args on_truncation=count"
            )

    # Forward passes

    def _model_call(self, inps, attn_mask=None, labels=None):
        if self.probes is None:
            logits = super()._model_call(inps, attn_mask, labels)
        else:
            logits = self.probes.forward(inps, super()._model_call)
        if logits.max().isnan():  # of log-likelihoods that are nan, the largest is any one
            raise ValueError(f"{type(self.model).__name__} gives nan as logits: look at its weights.")
        return logits

    def _model_generate(self, context, max_length, stop, **options):
        with self.probes.attached() if self.probes else nullcontext():
            return super()._model_generate(context, max_length, stop, **options)

    def _detect_batch_size(self, requests=None, pos: int = 0) -> int:
        """As in HFLM, but a size that held for longer requests is taken again: tasks run one by one."""
        length = len(requests[pos][1] + requests[pos][2]) if requests else self.max_length
        known = [size for longer, size in self._batch_size_at.items() if longer >= length]
        if not known:
            probes, self.probes = self.probes, None
            try:
                self._batch_size_at[length] = super()._detect_batch_size(requests, pos)
            finally:
                self.probes = probes
        return max(known, default=self._batch_size_at.get(length))

    def get_model_info(self) -> dict[str, Any]:
        """What the harness writes into the `config` of its results."""
        info = super().get_model_info()
        info["bos"] = self.bos
        info["bos_token"] = None if self.bos == "none" else self.tokenizer.decode([self.prefix_token_id])
        info["context_length"] = self.max_length
        if self.probes:
            info["probes"] = self.probes.report()
        return info


def tokenizer_beside(model: torch.nn.Module, options: dict[str, Any]) -> Any:
    """
    The tokenizer for a loaded model: its name, or a copy of the one given, since the harness sets a padding token.

    Raises ValueError where there is none, and for options that say how to load a model.
    """
    tokenizer = options.get("tokenizer") or getattr(model, "name_or_path", "")
    if not tokenizer:
        raise ValueError(f"This {type(model).__name__} was loaded from no folder: give tokenizer= beside it.")
    meaningful = BESIDE_A_MODEL + (OF_A_NAMED_TOKENIZER if isinstance(tokenizer, str) else ())
    if refused := sorted(name for name in options.keys() - meaningful if options[name] not in (None, False)):
        raise ValueError(
            f"{', '.join(refused)} beside a loaded model would change nothing: load the {type(model).__name__} that "
            "way, or pass its Hub id or folder."
        )
    return tokenizer if isinstance(tokenizer, str) else copy.deepcopy(tokenizer)


def probe_names(probes: str | Iterable[str] | None) -> list[str]:
    """Names of probes from a list or from text such as `gates,sink`; ValueError for unknown ones."""
    names = probes.strip("[]").replace("+", ",").split(",") if isinstance(probes, str) else list(probes or ())
    names = [name.strip(" '\"") for name in names if name.strip()]
    if unknown := sorted(set(names) - set(COLLECTORS)):
        raise ValueError(f"probes={','.join(unknown)} is not known; choose from {', '.join(COLLECTORS)}.")
    return names
