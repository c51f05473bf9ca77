"""`RetrofitTrainer`: transformers.Trainer with the losses, parameter groups and stages of a retrofit."""

import fnmatch
import math
from pathlib import Path

import torch
from accelerate import DistributedType
from torch import nn
from transformers import Trainer, TrainerCallback, TrainingArguments

from ..convert.tensor_files import is_finite, one_line
from ..convert.tokenizer import copy_files
from ..diagnostics.corpus import with_first
from .data import Rows, draw
from .losses import LOSSES, Batch, Record, hidden_first_key, plain_name, recording, student_kinds
from .settings import NEED_SOURCE, PARTS, Gates, Settings, Stage, in_steps


class RetrofitTrainer(Trainer):
    """
    Trains a gated_llama model on rows of ids ({"input_ids", "row"}, all of one length, without padding).

    A step's loss is the mean over all its tokens, however they are spread over micro-batches and ranks. Each term is
    logged as `loss_<name>`, unweighted. Stages switch `requires_grad`; the optimizer holds what any stage trains.

    Args:
        model: the student.
        args: the library's arguments, as `settings.training_arguments` gives them.
        settings: losses, gates, stages and first-key dropout.
        rows: the training data.
        source: the model that losses compare with, or None; it is frozen.
        student_bos, source_bos: ids that are put before each row, or None.
        files: folder of the student, whose tokenizer files go into every saved model.

    Raises ValueError for settings that do not fit the model or the arguments.
    """

    def __init__(
        self,
        model: nn.Module,
        args: TrainingArguments,
        *,
        settings: Settings,
        rows: Rows,
        source: nn.Module | None = None,
        student_bos: int | None = None,
        source_bos: int | None = None,
        files: str | Path | None = None,
        callbacks: list[TrainerCallback] | None = None,
    ):
        if not isinstance(rows, Rows):
            raise ValueError(f"rows are a {type(rows).__name__}: make them with `mix_rows`.")
        check_run(model, source, args, settings)
        for name in NEED_SOURCE:
            if name in settings.losses and source is None and (name != "kl" or rows.targets is None):
                raise ValueError(f"losses.{name} compares with a source: pass one to the trainer.")
        self.settings, self.files, self.model_class = settings, files, type(model)
        self.student_bos, self.source_bos = student_bos, source_bos
        self.groups = parameter_groups(model, settings)
        self.stage: Stage | None = None
        self._gates_rate: dict[str, float] = {}
        self._sums: dict[str, torch.Tensor] = {}  # of each term since it was logged: value * share, share
        for parameters in (model, source):
            if parameters is not None:
                parameters.requires_grad_(False)
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(name in self.groups)  # DDP learns at the start which gradients will come
        use_cache = model.config.use_cache
        super().__init__(model=model, args=args, train_dataset=rows, callbacks=callbacks)
        model.config.use_cache = use_cache  # of the result; training asks for no cache at each call
        if len(settings.stages) > 1 and (self.is_fsdp_enabled or self.is_deepspeed_enabled):
            raise ValueError("FSDP and DeepSpeed fix at the start what is trained: make each stage a run of its own.")
        self.loss_is_scaled_for_ga = True
        self.source = None if source is None else frozen(source, args)
        self.add_callback(_Steps(self))

    # Losses.

    def _get_num_items_in_batch(self, batch_samples, device):
        """Tokens of the whole optimizer step, over micro-batches and ranks."""
        if not batch_samples:
            return None
        tokens = torch.tensor(sum(batch["input_ids"].numel() for batch in batch_samples), device=device)
        return self.accelerator.gather(tokens).sum() if self.args.world_size > 1 else tokens

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        """The weighted sum of the terms, times this batch's share of the step's tokens and the number of ranks."""
        step, steps = self.state.global_step, self.settings.steps
        weights = {name: loss.weight * loss.factor(step, steps) for name, loss in self.settings.losses.items()}
        values, record = self.terms(model, inputs, [name for name, weight in weights.items() if weight])
        loss = torch.stack([weights[name] * value for name, value in values.items()]).sum()
        if num_items_in_batch is not None:
            share = inputs["input_ids"].numel() / num_items_in_batch
            for name, value in values.items():
                pair = torch.stack([value.detach() * share, share.to(value.dtype)])
                self._sums[name] = self._sums[name] + pair if name in self._sums else pair
            loss = loss * share * self.args.world_size  # gradients are averaged over ranks
        if self.args.world_size > 1:
            # DDP waits for every parameter's gradient, also where no loss looks at the logits.
            loss = loss + 0.0 * record.logits[0, 0, 0]
        return (loss, {"logits": record.logits}) if return_outputs else loss

    def terms(self, model: nn.Module, inputs: dict, names: list[str]) -> tuple[dict[str, torch.Tensor], Record]:
        """The terms `names`, each the mean over this batch's tokens, and what was recorded of the student."""
        if not names:
            raise ValueError(
                f"No loss is on at step {self.state.global_step}: of {', '.join(self.settings.losses)} one must be."
            )
        losses = {name: self.settings.losses[name] for name in names}
        ids, targets = inputs["input_ids"], None
        if "kl" in names and "target_ids" in inputs:
            targets = inputs["target_ids"], inputs["target_log_probabilities"]
        wanted = {kind for name in names for kind in LOSSES[name].source if not (name == "kl" and targets)}
        source = self.source_record(with_first(ids, self.source_bos), wanted) if wanted else None
        student_ids = with_first(ids, self.student_bos)
        mask = self.first_key_mask(student_ids, inputs)
        kinds = set().union(*(student_kinds(name, loss) for name, loss in losses.items()))
        with recording(self.accelerator.unwrap_model(model), kinds) as record:
            given = {} if mask is None else {"attention_mask": mask}
            record.logits = model(input_ids=student_ids, use_cache=False, **given).logits
        both = source is not None and None not in (self.student_bos, self.source_bos)
        batch = Batch(student_ids, ids.shape[1] + both, record, source, targets)
        return {name: LOSSES[name].value(batch, loss) for name, loss in losses.items()}, record

    @torch.no_grad()
    def source_record(self, ids: torch.Tensor, kinds: set[str]) -> Record:
        with recording(self.source, kinds) as record, self.accelerator.autocast():
            forward = self.source if "logits" in kinds else self.source.get_decoder()
            record.logits = forward(input_ids=ids, use_cache=False).get("logits")
        return record

    def first_key_mask(self, ids: torch.Tensor, inputs: dict) -> torch.Tensor | None:
        dropout = self.settings.first_key_dropout
        probability = dropout.probability * dropout.factor(self.state.global_step, self.settings.steps)
        if not probability:
            return None
        return hidden_first_key(ids, [draw(self.settings.seed, row) < probability for row in inputs["row"].tolist()])

    def log(self, logs, start_time=None):
        """Adds each term's mean since it was last logged, the gates' learning rate and the tokens so far."""
        if "loss" in logs and self._sums:
            sums = torch.stack([self._sums[name] for name in sorted(self._sums)])
            sums = self.accelerator.reduce(sums, "sum") if self.args.world_size > 1 else sums
            logs |= {f"loss_{name}": (s / n).item() for name, (s, n) in zip(sorted(self._sums), sums, strict=True)}
            logs |= self._gates_rate | {"tokens": self.state.global_step * self.tokens_per_step}
            self._sums = {}
        super().log(logs, start_time)
        # Before a checkpoint is written. Scaled gradients overflow now and then, and their step is left out.
        scaled = self.args.fp16 and self.args.device.type != "cpu"
        for name in ("loss",) if scaled else ("loss", "grad_norm"):
            if not math.isfinite(logs.get(name, 0.0)):
                raise diverged(f"The {name} is {logs[name]}", self.state.global_step)

    def _get_learning_rate(self) -> float:
        """The first group's, which the library asks for before the schedule moves on; the gates' is kept beside it."""
        rates = {group.get("name"): group["lr"] for group in self.optimizer.param_groups}
        self._gates_rate = {"learning_rate_gates": rates["gates"]} if "gates" in rates else {}
        return super()._get_learning_rate()

    @property
    def tokens_per_step(self) -> int:
        """Of the texts: first tokens that are put before rows are not counted."""
        rows = self.args.train_batch_size * self.args.gradient_accumulation_steps * self.args.world_size
        return rows * self.train_dataset.context

    # Parameters.

    def create_optimizer(self, model=None):
        """The optimizer that the arguments name, over the groups "weights", "vectors" and "gates"."""
        if self.optimizer is None:
            parameters = {plain_name(name): p for name, p in (model or self.model).named_parameters()}
            kind, options = optimizer_of(self.args, self.model)
            gates = gate_rate(self.settings.gates, self.args.learning_rate)
            rules = {"weights": {"weight_decay": self.args.weight_decay}, "vectors": {"weight_decay": 0.0}}
            rules["gates"] = {"weight_decay": 0.0, "lr": gates}
            groups = [
                {"params": [parameters[n] for n, group in self.groups.items() if group == name], "name": name} | rule
                for name, rule in rules.items()
            ]
            self.optimizer = kind([group for group in groups if group["params"]], **options)
        return self.optimizer

    def enter_stage(self, step: int) -> None:
        """Lets gradients flow to what the stage at `step` trains, and to nothing else."""
        stage = stage_at(self.settings, step)
        if stage is self.stage:
            return
        self.stage = stage
        for name, parameter in self.model.named_parameters():
            name = plain_name(name)
            parameter.requires_grad_(name in self.groups and trains(stage, name, self.settings.gates))

    # Files.

    def save_model(self, output_dir=None, _internal_call=False):
        """Whole weights, also where checkpoints (an internal call) are sharded. All ranks take part."""
        if self.is_fsdp_enabled and not _internal_call:
            self._save(output_dir, self.accelerator.get_state_dict(self.model))
        else:
            super().save_model(output_dir, _internal_call)

    def _save(self, output_dir=None, state_dict=None):
        output_dir = output_dir or self.args.output_dir
        weights = state_dict if state_dict is not None else self.accelerator.unwrap_model(self.model).state_dict()
        if broken := next((name for name, weight in weights.items() if not is_finite(weight.detach())), None):
            raise diverged(f"{broken} holds values that are not finite", self.state.global_step)
        if self.is_fsdp_enabled and self.args.should_save:
            self._save_gathered(output_dir, state_dict)
        else:
            super()._save(output_dir, state_dict)
        if self.args.should_save and self.files is not None:
            copy_files(Path(self.files), Path(output_dir))

    def _save_gathered(self, output_dir: str, state_dict: dict) -> None:
        """
        Whole weights, through a model without any.

        FSDP gives the sharded model a class of torch's own, whose files would be saved as the model's code, and
        gathers a tied weight once for each of its names.
        """
        sharded = self.accelerator.unwrap_model(self.model)
        with torch.device("meta"):
            plain = self.model_class(sharded.config)
        plain.generation_config = sharded.generation_config
        tied = plain.all_tied_weights_keys
        plain.save_pretrained(output_dir, state_dict={k: v for k, v in state_dict.items() if k not in tied})


class _Steps(TrainerCallback):
    """Enters stages; logs what is saved and the last step, since sums since the last log are in no checkpoint."""

    def __init__(self, trainer: RetrofitTrainer):
        self.trainer = trainer

    def on_step_begin(self, args, state, control, **kwargs):
        self.trainer.enter_stage(state.global_step)

    def on_step_end(self, args, state, control, **kwargs):
        control.should_log |= control.should_save or state.global_step >= state.max_steps


def diverged(what: str, step: int) -> ValueError:
    """The error of a run whose numbers are no longer finite."""
    return ValueError(
        f"{what} at step {step}: lower the learning rate, or the weight of the term that grew, and start anew (with "
        "--resume none, or another output)."
    )


def frozen(source: nn.Module, args: TrainingArguments) -> nn.Module:
    """
    The source in eval mode on the arguments' device.

    Under bf16 autocast its linear maps are kept in bfloat16: what autocast makes of them at each call, bit for bit. It
    does not reach gates in float32.
    """
    source = source.eval().to(args.device)
    for module in source.modules():
        if args.bf16 and isinstance(module, nn.Linear) and not getattr(module, "in_fp32", False):
            for name, parameter in list(module.named_parameters(recurse=False)):
                # A tied embedding stays as it is: autocast does not reach it.
                setattr(module, name, nn.Parameter(parameter.detach().bfloat16(), requires_grad=False))
    return source


def stage_at(settings: Settings, step: int) -> Stage:
    """The stage of an optimizer step, counted from 0."""
    ends = [settings.steps if s.until is None else in_steps(s.until, settings.steps) for s in settings.stages]
    return next((s for s, end in zip(settings.stages, ends, strict=True) if step < end), settings.stages[-1])


def trains(stage: Stage, name: str, gates: Gates) -> bool:
    """Whether the stage trains the parameter `name`."""
    patterns = [pattern for part in stage.train for pattern in (gates.parameters if part == "gates" else PARTS[part])]
    return matches(name, patterns)


def matches(name: str, patterns) -> bool:
    """Whether a parameter's name fits one of the shell-style patterns."""
    return any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)


def parameter_groups(model: nn.Module, settings: Settings) -> dict[str, str]:
    """
    Name -> group of every parameter that some stage trains: "gates", "vectors" (one-dimensional) or "weights".

    Raises ValueError for a pattern that matches nothing, a model without gates, a stage that trains nothing, and a
    gates' learning rate where no stage trains gates.
    """
    names = [name for name, _ in model.named_parameters()]
    patterns = settings.gates.parameters
    unmatched = [pattern for pattern in patterns if not any(matches(name, [pattern]) for name in names)]
    if patterns != Gates().parameters and unmatched:
        raise ValueError(
            f"gates.parameters: {unmatched[0]!r} matches no parameter; there are, for instance, "
            f"{', '.join(name for name in names if '.self_attn.' in name)[:200]} ..."
        )
    if model.config.gate_position is None:
        raise ValueError(f"{settings.model} has no gates to train: convert a checkpoint with `gated-llama convert`.")
    groups = {}
    for name, parameter in model.named_parameters():
        if any(trains(stage, name, settings.gates) for stage in settings.stages):
            vector = "vectors" if parameter.ndim < 2 else "weights"
            groups[name] = "gates" if matches(name, patterns) else vector
    for stage in settings.stages:
        if not any(trains(stage, name, settings.gates) for name in groups):
            raise ValueError(f"A stage trains {', '.join(stage.train)}, which {settings.model} has no parameters for.")
    if "gates" not in groups.values() and (settings.gates.learning_rate, settings.gates.multiplier) != (None, None):
        raise ValueError(
            "Gates have a learning rate of their own, and no stage trains parameters of gates: leave it out."
        )
    return groups


def gate_rate(gates: Gates, base: float) -> float:
    """The gates' learning rate: their own, or a multiple of `base`."""
    if gates.learning_rate is not None:
        return gates.learning_rate
    return base * (1.0 if gates.multiplier is None else gates.multiplier)


def optimizer_of(args: TrainingArguments, model: nn.Module) -> tuple[type[torch.optim.Optimizer], dict]:
    """Class and options; ValueError or ImportError for one that is not installed or brings its own groups."""
    try:
        kind, options = Trainer.get_optimizer_cls_and_kwargs(args, model)
        if "params" not in options and isinstance(kind, type):
            kind([nn.Parameter(torch.zeros(1))], **options)  # says what it does not take
    except ValueError as error:
        options = f"optim={args.optim.value} with optim_args={args.optim_args!r}"
        raise ValueError(f"training.{options}: {one_line(error)}") from error
    if not (isinstance(kind, type) and issubclass(kind, torch.optim.Optimizer)) or "params" in options:
        raise ValueError(f"training.optim={args.optim.value} makes parameter groups of its own: use another.")
    return kind, options


def check_run(model: nn.Module, source: nn.Module | None, args: TrainingArguments, settings: Settings) -> None:
    """ValueError for settings that the model, or the way it is trained, cannot carry out."""
    if hasattr(model, "peft_config"):
        raise ValueError(
            "RetrofitTrainer trains whole models: use transformers.Trainer for PEFT's, or train the gated model and "
            "take its gates out with GateAdapter.extract."
        )
    kinds = set().union(*(student_kinds(name, loss) for name, loss in settings.losses.items()))
    if args.max_steps != settings.steps:
        raise ValueError(f"max_steps={args.max_steps} in the arguments and {settings.steps} in the settings.")
    if args.remove_unused_columns:
        raise ValueError("remove_unused_columns must be False: `training_arguments(settings)` makes the arguments.")
    optimizer_of(args, model)
    if args.n_gpu > 1:
        raise ValueError("Several GPUs in one process split batches past the losses: launch with torchrun.")
    if args.fsdp and args.distributed_state.distributed_type == DistributedType.MULTI_CPU:
        raise ValueError("training.fsdp: accelerate shards over accelerators only, not over CPU processes.")
    if kinds and args.torch_compile:
        raise ValueError(f"training.torch_compile runs past what {', '.join(settings.losses)} look at: leave it out.")
    reentrant = (args.activation_checkpointing_kwargs or {}).get("use_reentrant", False)
    if kinds and args.activation_checkpointing and reentrant:
        raise ValueError("Recorded states have no gradient under reentrant checkpointing: set use_reentrant: false.")
    if settings.first_key_dropout.probability:
        if model.config._attn_implementation != "sdpa":
            raise ValueError(f"first_key_dropout needs sdpa attention, not {model.config._attn_implementation!r}.")
        if "sliding_attention" in model.config.layer_types:
            raise ValueError("first_key_dropout is for full attention; this model has sliding windows.")
    if source is not None:
        widths = (model.config.vocab_size, source.config.get_text_config().vocab_size)
        if "kl" in settings.losses and widths[0] != widths[1]:
            raise ValueError(f"losses.kl: {settings.model} has {widths[0]} logits and {settings.source} {widths[1]}.")
        for field, what in (("num_hidden_layers", "layers"), ("hidden_size", "coordinates")):
            sizes = [getattr(config, field) for config in (model.config, source.config.get_text_config())]
            if "attention_output" in settings.losses and sizes[0] != sizes[1]:
                raise ValueError(f"losses.attention_output: {sizes[0]} {what} cannot be matched with {sizes[1]}.")
