"""How diagnostics attach to a loaded model: hooks on its decoder, and a tap on the Transformers attention interface.

A probe is a context manager. Inside it, every forward pass of the decoder adds to streaming sums; on leaving, also by
an exception, every hook is gone and the interface is the library's own. Nothing that a probe does changes the model's
output. The tap sees the modules it was given, whatever other models and threads do meanwhile.
"""

import contextlib
import functools
import inspect
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import TypeVar

import torch
from torch import nn
from torch.nn.attention.flex_attention import BlockMask
from torch.utils._python_dispatch import TorchDispatchMode
from transformers.modeling_utils import AttentionInterface

from .visibility import Layout, sequence_layout


Result = TypeVar("Result")

DISPATCHER = "ALL_ATTENTION_FUNCTIONS"  # the global through which an attention's forward reaches the interface


def decoder_of(model: nn.Module) -> nn.Module:
    """
    The module that turns token ids into hidden states: `model.model` of a causal language model, or the model itself.

    Raises ValueError for a compiled wrapper (a compiled graph runs past hooks) and for encoder-decoders.
    """
    if hasattr(model, "_orig_mod"):
        raise ValueError(
            "The model is wrapped by torch.compile, which runs past probes: pass and call `model._orig_mod`."
        )
    if any(module._compiled_call_impl is not None for module in model.modules()):
        raise ValueError(
            "The model was compiled in place, which runs past probes: measure it before `model.compile()`."
        )
    config = getattr(model, "config", None)
    if getattr(config, "is_encoder_decoder", False):
        raise ValueError(
            f"{type(model).__name__} is an encoder-decoder; diagnostics need a decoder-only language model."
        )
    if not hasattr(model, "get_decoder"):
        raise ValueError(f"{type(model).__name__} is not a Transformers language model (it has no `get_decoder`).")
    return model.get_decoder()


@contextlib.contextmanager
def eval_mode(model: nn.Module) -> Iterator[None]:
    """`model.eval()` for the block; afterwards each module is in the mode that it was in."""
    training = [module for module in model.modules() if module.training]
    model.eval()
    try:
        yield
    finally:
        for module in training:
            module.training = True


def in_eval_mode(measure: Callable[..., Result]) -> Callable[..., Result]:
    """A function of a model that measures it without dropout, whatever mode the model is in."""

    @functools.wraps(measure)
    def measure_in_eval_mode(model: nn.Module, *args, **kwargs) -> Result:
        with eval_mode(model):
            return measure(model, *args, **kwargs)

    return measure_in_eval_mode


def attention_modules(model: nn.Module) -> dict[int, nn.Module]:
    """
    The decoder's causal self-attention modules that dispatch through the Transformers attention interface, by layer.

    Layers of another kind (linear attention, state spaces) are left out. Raises ValueError when there is none: for an
    encoder, whose attention is not causal, and for a model whose attention calls its kernels by itself.
    """
    found = [module for module in decoder_of(model).modules() if _dispatches(type(module))]
    if not found:
        raise ValueError(
            f"{type(model).__name__} does not dispatch through the Transformers attention interface "
            f"(no module's forward uses {DISPATCHER}), so its queries and keys cannot be seen."
        )
    causal = [module for module in found if getattr(module, "is_causal", True)]
    causal = causal if getattr(model.config, "is_causal", True) else []
    if not causal:
        raise ValueError(
            f"{type(model).__name__} is an encoder: its attention is not causal. Diagnostics need a decoder-only "
            "language model."
        )
    named = {getattr(module, "layer_idx", None): module for module in causal}
    return named if len(named) == len(causal) and None not in named else dict(enumerate(causal))


@functools.lru_cache(maxsize=4096)
def _dispatches(module_class: type[nn.Module]) -> bool:
    code = getattr(inspect.unwrap(module_class.forward), "__code__", None)
    return code is not None and DISPATCHER in code.co_names


def decoder_layers(model: nn.Module) -> nn.ModuleList:
    """The stack of decoder layers. Raises ValueError if the decoder holds no list of `num_hidden_layers` modules."""
    decoder = decoder_of(model)
    depth = decoder.config.num_hidden_layers
    for module in decoder.children():
        if isinstance(module, nn.ModuleList) and len(module) == depth:
            return module
    raise ValueError(f"{type(decoder).__name__} holds no list of its {depth} layers, so their outputs cannot be read.")


def named_arguments(module: nn.Module, args: tuple, kwargs: dict) -> dict:
    """The arguments of a call of `module`, all by name, as a forward pre-hook sees them."""
    signature = inspect.signature(module.forward)
    given = signature.bind_partial(*args, **kwargs).arguments
    rest = (name for name, parameter in signature.parameters.items() if parameter.kind is parameter.VAR_KEYWORD)
    return given | given.pop(next(rest, ""), {})


@dataclass
class AttentionCall:
    """
    One call of the attention interface, as its listeners see it.

    query [batch, heads, seq, width], key and value [batch, kv heads, keys, width], output [batch, seq, heads, width];
    log_sum_exp [batch, heads, seq] if the kernel computed it, else None.
    """

    layer: int
    module: nn.Module
    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    mask: torch.Tensor | BlockMask | None
    output: torch.Tensor
    log_sum_exp: torch.Tensor | None
    options: dict = field(default_factory=dict)

    @property
    def scaling(self) -> float:
        scaling = self.options.get("scaling")
        return self.query.shape[-1] ** -0.5 if scaling is None else scaling


class _KernelLogSumExp(TorchDispatchMode):
    """
    Picks up the log-sum-exp that the fused CPU kernel behind `scaled_dot_product_attention` computes and discards.

    The kernel runs exactly as it would; other kernels leave `value` None.
    """

    KERNEL = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default

    def __init__(self):
        super().__init__()
        self.value = None

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        if function is self.KERNEL:
            self.value = result[1].detach()
        return result


_library_interface = AttentionInterface.get_interface
_listeners: dict[nn.Module, list[tuple[int, Callable[[AttentionCall], None]]]] = {}
_changing = threading.Lock()  # held while listeners, or the thread of a pass, change


def _tapped_interface(interface: AttentionInterface, name: str, default: Callable) -> Callable:
    """`AttentionInterface.get_interface`, whose functions also report to the listeners of the calling module."""
    function = _library_interface(interface, name, default)

    def attention(module, query, key, value, *args, **kwargs):
        listeners = _listeners.get(module, ())
        if not listeners:
            return function(module, query, key, value, *args, **kwargs)
        kernel = _KernelLogSumExp()
        with kernel if name == "sdpa" else contextlib.nullcontext():
            result = function(module, query, key, value, *args, **kwargs)
        options = dict(kwargs)
        mask = args[0] if args else options.pop("attention_mask", None)
        tensors = (query.detach(), key.detach(), value.detach(), mask, result[0].detach(), kernel.value)
        for layer, listener in list(listeners):
            with torch.no_grad(), torch.autocast(query.device.type, enabled=False):
                listener(AttentionCall(layer, module, *tensors, options))
        return result

    return attention


@contextlib.contextmanager
def listen_to_attention(modules: dict[int, nn.Module], listener: Callable[[AttentionCall], None]) -> Iterator[None]:
    """Calls `listener` after each attention call of `modules`; afterwards the interface is the library's own."""
    with _changing:
        for layer, module in modules.items():
            _listeners.setdefault(module, []).append((layer, listener))
        AttentionInterface.get_interface = _tapped_interface
    try:
        yield
    finally:
        with _changing:
            for layer, module in modules.items():
                _listeners[module].remove((layer, listener))
                if not _listeners[module]:
                    del _listeners[module]
            if not _listeners:
                AttentionInterface.get_interface = _library_interface


class Probe:
    """
    Base of the probes: `with Probe(model) as probe: model(ids)`, then `probe.result()`.

    Counted are forward passes over whole sequences, that is with no cache or an empty one; passes that continue a
    cache (the decoding steps of `generate`) and the recomputation of activation checkpointing are not. `start()` and
    `stop()` do the same as the context manager, for callbacks; entering again continues the sums. A forward pass that
    another thread starts during one of this model is refused with a ValueError.
    """

    def __init__(self, model: nn.Module):
        self.model = model
        self.decoder = decoder_of(model)
        self.layout: Layout | None = None
        self.input_ids: torch.Tensor | None = None
        self.tokens = self.documents = self.skipped_forwards = 0
        self.first_token_ids: Counter[int] = Counter()
        self._active: contextlib.ExitStack | None = None
        self._thread: threading.Thread | None = None  # the one whose pass is being observed

    def __enter__(self):
        self.start()
        return self

    def __exit__(self, *exception):
        self.stop()

    def start(self) -> None:
        """Attaches the probe. Raises ValueError if it is attached already."""
        if self._active is not None:
            raise ValueError(f"This {type(self).__name__} is attached already: stop it first, or make a second one.")
        with contextlib.ExitStack() as stack:
            hooks = (
                self.decoder.register_forward_pre_hook(self._begin, with_kwargs=True),
                self.decoder.register_forward_hook(self._end, always_call=True),
            )
            for handle in (*hooks, *self.hooks()):
                stack.callback(handle.remove)
            for context in self.contexts():
                stack.enter_context(context)
            self._active = stack.pop_all()

    def stop(self) -> None:
        """Detaches the probe; its sums stay."""
        if self._active is not None:
            self._active.close()
            self._active = self.layout = self.input_ids = self._thread = None

    def hooks(self) -> Iterable:
        """Handles of the hooks that a subclass registers on attaching."""
        return ()

    def contexts(self) -> Iterable[contextlib.AbstractContextManager]:
        """Context managers that a subclass holds open while attached."""
        return ()

    def begin(self) -> None:
        """Called at the start of each counted forward pass, when `layout` and `input_ids` are set."""

    def finish(self) -> None:
        """Called at the end of each counted forward pass that did not fail."""

    def first_tokens(self) -> list[dict]:
        """What stands first in the documents: [{"id": token id, "count": documents}], most frequent first."""
        return [{"id": token, "count": count} for token, count in self.first_token_ids.most_common()]

    def require_observations(self) -> None:
        """Raises ValueError when no forward pass was counted, so that nothing is ever reported from nothing."""
        if not self.tokens:
            raise ValueError(
                f"{type(self).__name__} saw no whole sequence ({self.skipped_forwards} forward passes continued a "
                "cache). Call the model inside the `with` block, with an empty cache or none; a compiled model runs "
                "past probes."
            )

    def _take_turn(self) -> None:
        with _changing:
            own = threading.current_thread()
            if self._thread not in (None, own) and self._thread.is_alive():
                raise ValueError(
                    f"Two threads run the model that a {type(self).__name__} observes: give each thread a copy of the "
                    "model and a probe of its own, or let them take turns."
                )
            self._thread = own

    def _begin(self, decoder, args, kwargs):
        self._take_turn()
        given = named_arguments(decoder, args, kwargs)
        cache = given.get("cache", given.get("past_key_values"))
        self.layout = None
        if cache is not None and int(cache.get_seq_length()) > 0:
            self.skipped_forwards += 1
            return
        self.input_ids = given.get("input_ids")
        tokens = self.input_ids if self.input_ids is not None else given["inputs_embeds"]
        self.layout = sequence_layout(
            *tokens.shape[:2],
            tokens.device,
            given.get("attention_mask"),
            given.get("position_ids"),
            given.get("cu_seq_lens_q"),
        )
        self.begin()

    def _end(self, decoder, args, output):
        if self._thread is not threading.current_thread():  # a pass that was refused
            return
        self._thread = None
        layout, input_ids = self.layout, self.input_ids
        self.layout = self.input_ids = None
        if layout is None or output is None:  # not counted, or the pass failed
            return
        self.finish()
        self.tokens += int(layout.real.sum())
        self.documents += int(layout.first.sum())
        if input_ids is not None:
            self.first_token_ids.update(input_ids[layout.first].tolist())
