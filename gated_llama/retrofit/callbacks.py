"""What looks on while a retrofit trains: interruption, progress, and the gates and sinks on a fixed batch."""

import math
import signal
import threading
import time
from collections.abc import Callable

import torch
from torch import distributed
from transformers import TrainerCallback
from transformers.utils import logging

from ..diagnostics import Activations, FirstTokenAttention, GateScores, decoder_of
from ..diagnostics.gates import gate_modules
from ..diagnostics.probes import eval_mode
from .losses import plain_name
from .settings import Settings, in_steps
from .trainer import RetrofitTrainer, diverged, matches, trains


logger = logging.get_logger(__name__)

SIGNALS = ("SIGINT", "SIGTERM", "SIGHUP")


class Interruption(TrainerCallback):
    """
    Ends the run after the step that is under way, with a checkpoint, when a signal asks for it; a second one is heard
    at once. All ranks end at the same step.
    """

    def __init__(self):
        self.asked = self.happened = False
        self._previous: dict[int, object] = {}

    def on_train_begin(self, args, state, control, **kwargs):
        if threading.current_thread() is threading.main_thread():
            names = [name for name in SIGNALS if hasattr(signal, name)]
            if hasattr(signal, "SIGHUP") and signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:  # nohup's wish
                names.remove("SIGHUP")
            numbers = [getattr(signal, name) for name in names]
            self._previous = {number: signal.signal(number, self._hear) for number in numbers}

    def _hear(self, number, frame):
        if self.asked:
            raise KeyboardInterrupt
        self.asked = True

    def on_step_end(self, args, state, control, **kwargs):
        if args.world_size > 1:
            asked = torch.tensor(int(self.asked), device=args.device)
            distributed.all_reduce(asked, distributed.ReduceOp.MAX)
            self.asked = bool(asked)
        if self.asked and state.global_step < state.max_steps:
            self.happened = control.should_training_stop = control.should_save = True
            control.should_log = True  # what was summed since the last log is in no checkpoint

    def release(self):
        """Gives the signals back; call it whatever way training ended."""
        for number, handler in self._previous.items():
            signal.signal(number, handler)
        self._previous = {}


class Clock(TrainerCallback):
    """Adds `seconds` to each log: of this run, over all its sessions, as far as they were saved."""

    def on_train_begin(self, args, state, control, **kwargs):
        before = [entry["seconds"] for entry in state.log_history if "seconds" in entry]
        self.start = time.monotonic() - (before[-1] if before else 0.0)

    def on_log(self, args, state, control, logs=None, **kwargs):
        state.log_history[-1]["seconds"] = round(time.monotonic() - self.start, 3)


class Told(TrainerCallback):
    """Calls progress(step, steps, latest log) after each log, on the main process."""

    def __init__(self, progress: Callable[[int, int, dict], None]):
        self.progress = progress

    def on_train_begin(self, args, state, control, **kwargs):
        if state.is_world_process_zero:
            self.progress(state.global_step, state.max_steps, {})

    def on_log(self, args, state, control, logs=None, **kwargs):
        if state.is_world_process_zero:
            self.progress(state.global_step, state.max_steps, state.log_history[-1])


class Watch(TrainerCallback):
    """
    Measures the student on a fixed batch, at both ends and every so often, and logs what it finds:

    first_token_attention: F-Attn. most_attended: attention on the one key that gets most of it, where rows are long
    enough. max_activation, m_act: the largest and the mean largest |h| of layer outputs.
    gate_mean, gate_below, gate_above: mean score, shares below 0.1 and above 0.9. gate_change: mean |score - score at
    the start|. gate_movement: |W - W_start| over the larger of |W_start| and the norm that random gates would have.
    gate_norm, base_norm: of the gates and of all other weights.

    Warns once when the scores have changed by less than `least_change` at the moment `warn_after`; not for a
    transplant, whose gates begin where they belong. Training is not touched: no gradients, no random numbers, and the
    model is left in the mode in which it was found.
    """

    def __init__(self, trainer: RetrofitTrainer, ids: torch.Tensor):
        self.trainer, self.ids = trainer, ids
        self.settings: Settings = trainer.settings
        names = {name for name, _ in trainer.model.named_parameters()}
        self.gates = {name for name in names if matches(name, self.settings.gates.parameters)}
        self.start = {name: p.detach().clone() for name, p in trainer.model.named_parameters() if name in self.gates}
        self.start_scores = self.scores()
        record = getattr(trainer.model.config, "gate_retrofit", None) or {}
        stages, gates = self.settings.stages, self.settings.gates
        trained = any(trains(stage, name, gates) for stage in stages for name in self.gates)
        self.warned = record.get("policy") == "transplant" or not trained
        self.failure: ValueError | None = None

    def on_train_begin(self, args, state, control, **kwargs):
        if state.global_step == 0:
            self.report(control)

    def on_step_end(self, args, state, control, **kwargs):
        every = max(1, in_steps(self.settings.measure.every, state.max_steps))
        warn_at = max(1, in_steps(self.settings.measure.warn_after, state.max_steps))
        if state.global_step % every == 0 or state.global_step in (warn_at, state.max_steps):
            try:
                found = self.report(control)
            except ValueError as error:  # of a probe, about what is not finite: told when the step itself is logged
                self.failure, control.should_log = diverged(str(error).rstrip("."), state.global_step), True
                return
            if state.global_step >= warn_at and not self.warned:
                self.warn(state.global_step, found["gate_change"])

    def on_log(self, args, state, control, **kwargs):
        if self.failure is not None:
            raise self.failure

    def warn(self, step: int, change: float):
        self.warned = True
        if change < self.settings.measure.least_change:
            logger.warning(
                f"The gates have not moved: after {step} steps their scores differ from the start by {change:.2g} in "
                "the mean. Without pressure, gates that start open or at the identity stay there: raise "
                "gates.multiplier or gates.learning_rate, or add a loss that asks for them (kl with outlier, or sink)."
            )

    def report(self, control) -> dict[str, float]:
        found, wanted = self.measure(), control.should_log
        self.trainer.log({f"watch_{name}": value for name, value in found.items()})
        control.should_log = wanted  # logging takes a step's own log as done
        return found

    @torch.no_grad()
    def measure(self) -> dict[str, float]:
        model = self.trainer.model
        with FirstTokenAttention(model) as attention, Activations(model) as activations, GateScores(model) as gates:
            scores = self.scores()
        attended, states, gate = attention.result(), activations.result(), gates.result()
        changes = [(now - then).abs().mean().item() for now, then in zip(scores, self.start_scores, strict=True)]
        return {
            "first_token_attention": attended.mean,
            **({} if attended.most_attended is None else {"most_attended": attended.most_attended}),
            "max_activation": states.max,
            "m_act": states.m_act,
            "gate_mean": gate.mean,
            "gate_below": gate.share_below,
            "gate_above": gate.share_above,
            "gate_change": sum(changes) / len(changes),
            **self.norms(),
        }

    @torch.no_grad()
    def scores(self) -> list[torch.Tensor]:
        """Of each gated layer on the fixed batch, from one forward pass of the decoder."""
        model, kept = self.trainer.model, []
        handles = [
            module.attn_gate.register_forward_hook(lambda _, args, output: kept.append(output[1].float().clone()))
            for _, module in sorted(gate_modules(model)[1].items())
        ]
        try:
            with eval_mode(model), self.trainer.accelerator.autocast():
                decoder_of(model)(input_ids=self.ids.to(self.trainer.args.device), use_cache=False)
        finally:
            for handle in handles:
                handle.remove()
        return kept

    @torch.no_grad()
    def norms(self) -> dict[str, float]:
        squares = {"gate": 0.0, "base": 0.0, "moved": 0.0, "start": 0.0, "random": 0.0}
        scale = self.trainer.model.config.initializer_range
        for name, parameter in self.trainer.model.named_parameters():
            name, value = plain_name(name), parameter.detach()
            squares["gate" if name in self.gates else "base"] += value.float().square().sum().item()
            if name in self.start:
                start = self.start[name].to(value.device)
                squares["moved"] += (value - start).float().square().sum().item()
                squares["start"] += start.float().square().sum().item()
                squares["random"] += scale**2 * start.numel()
        size = math.sqrt(max(squares["start"], squares["random"])) or 1.0  # a gate may have no parameters
        norms = {f"{part}_norm": math.sqrt(squares[part]) for part in ("gate", "base")}
        return norms | {"gate_movement": math.sqrt(squares["moved"]) / size}
