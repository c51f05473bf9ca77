"""Two decoders, layer after layer side by side: the source with its sink, and the gated model without."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch
from torch import nn

from ..diagnostics.corpus import with_first
from ..diagnostics.probes import AttentionCall, listen_to_attention
from .calibration import Scratch
from .fitting import GateFit, GateProblem, Moments, fit_gates


@dataclass(frozen=True)
class WalkOptions:
    """
    How a layer is matched.

    share: how much of the error that earlier layers left the targets make good, 0 to 1. ridge: of the linear refits,
    relative to the mean second moment; `None` leaves o_proj and down_proj as they are. spike: tokens whose largest
    |state| in the source exceeds this many times the median token's are left out of the fits, or the model would learn
    to rebuild the massive activations that it must lose. likeness: of the scores to the survivors, see `fit_gates`.
    gate_tokens: how many tokens the gates are fitted on at most, evenly spread; the refits see all. batch: rows at a
    time.
    """

    share: float = 1.0
    ridge: float | None = 0.01
    likeness: float = 0.02
    spike: float = 8.0
    gate_tokens: int = 65536
    batch: int = 4


@dataclass(frozen=True)
class LayerFit:
    """
    One layer of a transplant. heads: those with a fitted gate; the others stay at the identity. r2, of every head:
    None without a fitted gate, or where attention on sinks never varies.

    gates_error: `GateProblem.error` with the fitted scores. attention_error, mlp_error: mean squared distance from
    what the attention and the MLP were to write over its mean square, after the linear refit. state_error: the same of
    the layer's output. left_out: tokens that the fits did not see. quieted: units of the MLP that are silenced.
    """

    layer: int
    heads: list[int]
    r2: list[float | None]
    gates_error: float
    attention_error: float
    mlp_error: float
    state_error: float
    left_out: int
    quieted: list[int]


class Walk:
    """
    The states of the calibration rows before a layer of both models; `layer` edits it in the gated one and steps on.

    source and gated: gated_llama decoders of the same shape, the first without gates. The source reads `first` before
    each row, the gated model does not.
    """

    def __init__(self, source, gated, rows: torch.Tensor, first: int, scratch: Scratch, options: WalkOptions):
        self.source, self.gated, self.scratch, self.options = source, gated, scratch, options
        self.rows, self.context = rows.shape
        config = source.config
        self.hidden, self.heads, self.width = config.hidden_size, config.num_attention_heads, config.head_dim
        self.device = source.device
        longer = with_first(rows, first)
        self.before = scratch("source", self.rows, self.context + 1, self.hidden)
        self.state = scratch("gated", self.rows, self.context, self.hidden)
        for part in self._parts():
            self.before[part] = source.embed_tokens(longer[part].to(self.device)).float().cpu()
            self.state[part] = gated.embed_tokens(rows[part].to(self.device)).float().cpu()
        positions = torch.arange(self.context + 1, device=self.device)[None]
        example = self.before[:1].to(self.device)
        self.source_rotary = source.rotary_emb(example, positions)
        self.gated_rotary = gated.rotary_emb(example, positions[:, :-1])

    @staticmethod
    def scratch_bytes(config, rows: torch.Tensor) -> int:
        """What the scratch files of a walk will hold: of each token seven states, MLP units, head reads, survivors."""
        heads = config.num_attention_heads * (config.head_dim + 1)
        states = (rows.numel() + 3 * len(rows)) * (7 * config.hidden_size + heads)
        return 4 * (states + rows.numel() * config.intermediate_size)

    def _parts(self) -> Iterator[slice]:
        return (slice(i, i + self.options.batch) for i in range(0, self.rows, self.options.batch))

    def _tokens(self, name: str, width: int) -> torch.Tensor:
        return self.scratch(name, self.rows, self.context, width)

    @torch.no_grad()
    def layer(self, index: int, fitted: torch.Tensor, quiet: list[int]) -> LayerFit:
        """Edits layer `index` of the gated model: heads where `fitted` get a gate, units in `quiet` fall silent."""
        used = self._follow_source(index)
        target, problem = self._pose(index, thinned(used, self.options.gate_tokens))
        gates = fit_gates(problem, fitted.to(problem.inputs.device), likeness=self.options.likeness)
        self._write_gates(index, gates, fitted)
        attention_error = self._refit_output(index, target, used, fitted)
        mlp_error = self._refit_mlp(index, quiet, used)
        known = zip(gates.r2.tolist(), fitted.tolist(), strict=True)
        return LayerFit(
            layer=index,
            heads=fitted.nonzero()[:, 0].tolist(),
            r2=[value if fits and value == value else None for value, fits in known],
            gates_error=gates.error,
            attention_error=attention_error,
            mlp_error=mlp_error,
            state_error=self._distance(used),
            left_out=int((~used).sum()),
            quieted=quiet,
        )

    def _distance(self, used: torch.Tensor) -> float:
        """Mean squared distance of the two models' states over the mean square of the source's."""
        apart = total = 0.0
        for part in self._parts():
            states = self.before[part, 1:][used[part]]
            apart += (states - self.state[part][used[part]]).square().sum(dtype=torch.float64).item()
            total += states.square().sum(dtype=torch.float64).item()
        return apart / total

    def _follow_source(self, index: int) -> torch.Tensor:
        """Runs the source's layer; returns the tokens [rows, context] that the fits may see."""
        layer = self.source.layers[index]
        attention, survivors = self._tokens("attention", self.hidden), self._tokens("survivors", self.heads)
        middle, after = (self.scratch(name, *self.before.shape) for name in ("middle", "after"))
        largest = torch.zeros(3, self.rows, self.context)
        sinks, seen = self._sinks(), {}

        def listen(call: AttentionCall):
            seen["survivors"] = 1 - attention_on(call, sinks[seen["part"]].to(self.device))
            seen["value"] = call.value[0, :, 0].clone()  # [kv heads, width]

        with listen_to_attention({index: layer.self_attn}, listen):
            for part in self._parts():
                before, seen["part"] = self.before[part].to(self.device), part
                attended = layer.self_attn(layer.input_layernorm(before), self.source_rotary)[0]
                between = before + attended
                behind = between + layer.mlp(layer.post_attention_layernorm(between))
                survivors[part] = seen["survivors"][:, :, 1:].transpose(1, 2).cpu()
                attention[part], middle[part], after[part] = attended[:, 1:].cpu(), between.cpu(), behind.cpu()
                for place, states in enumerate((before, between, behind)):
                    largest[place, part] = states[:, 1:].abs().amax(-1).cpu()
        self.value = seen["value"].float()
        limits = self.options.spike * largest.flatten(1).median(dim=1).values[:, None, None]
        return (largest <= limits).all(dim=0)

    def _sinks(self) -> torch.Tensor:
        """
        [rows, context + 1] bool: the first token, and tokens whose states before the layer are massive like its own.

        Queries attend to these as they do to the first token, for nothing; they will be ordinary tokens.
        """
        largest = torch.cat([self.before[part].abs().amax(-1) for part in self._parts()])
        sinks = largest > self.options.spike * largest[:, 1:].median()
        sinks[:, 0] = True
        return sinks

    def _pose(self, index: int, used: torch.Tensor) -> tuple[torch.Tensor, GateProblem]:
        """Re-centres the values of the gated layer; what its gated heads must write, and the problem of its gates."""
        layer, source = self.gated.layers[index], self.source.layers[index].self_attn
        attention = layer.self_attn
        attention.v_proj.bias.sub_(self.value.flatten())
        output = source.o_proj.weight.float()
        self.constant = self.value.repeat_interleave(self.heads // len(self.value), 0).flatten() @ output.T
        beside = self.constant if source.o_proj.bias is None else self.constant + source.o_proj.bias
        inputs, reads = self._tokens("inputs", self.hidden), self._tokens("reads", self.heads * self.width)
        target = self._tokens("target", self.hidden)
        seen = {}
        hook = attention.attn_gate.register_forward_pre_hook(lambda gate, args: seen.update(reads=args[0]))
        for part in self._parts():
            normed = layer.input_layernorm(self.state[part].to(self.device))
            attention(normed, self.gated_rotary)
            inputs[part], reads[part] = normed.cpu(), seen["reads"].flatten(2).cpu()
        hook.remove()
        for part in self._parts():
            error = self.before[part, 1:] - self.state[part]
            target[part] = self.scratch("attention")[part] - beside.cpu() + self.options.share * error
        return target, self._problem(output, target, used)

    def _problem(self, output: torch.Tensor, target: torch.Tensor, used: torch.Tensor) -> GateProblem:
        # Residual dimensions count by their own spread: the norms behind them even it out too.
        middle = self.scratch("middle")
        importance = 1 / (_variance(middle[part, 1:][used[part]] for part in self._parts()) + 1e-6).to(self.device)
        importance = importance / importance.mean()
        heads = output.T.unflatten(0, (self.heads, self.width))  # [heads, width, hidden]
        chunks = []
        for part in self._parts():
            chosen = used[part]
            reads = self.scratch("reads")[part][chosen].to(self.device).unflatten(-1, (self.heads, self.width))
            wanted = target[part][chosen].to(self.device)
            writes = torch.einsum("thw,hwo->tho", reads, heads)
            weighted = writes * importance
            energy = (wanted.square() * importance).sum(-1)
            chunks.append((weighted @ writes.transpose(1, 2), (weighted @ wanted[..., None])[..., 0], energy))
        gram, moment, energy = (torch.cat(tensors) for tensors in zip(*chunks, strict=True))
        inputs, survivors = (self.scratch(name)[used].to(self.device) for name in ("inputs", "survivors"))
        return GateProblem(inputs, gram, moment, energy, survivors)

    def _write_gates(self, index: int, gates: GateFit, fitted: torch.Tensor) -> None:
        """The logits of fitted heads; the others keep zeros, whose score 1/2 the output projection makes up for."""
        projection = self.gated.layers[index].self_attn.g_proj
        repeats = projection.weight.shape[0] // self.heads
        chosen = fitted.to(self.device)
        weight, bias = gates.weight.where(chosen[:, None], 0.0), gates.bias.where(chosen, 0.0)
        projection.weight.copy_(weight.repeat_interleave(repeats, 0))
        projection.bias.copy_(bias.repeat_interleave(repeats, 0))

    def _refit_output(self, index: int, target: torch.Tensor, used: torch.Tensor, fitted: torch.Tensor) -> float:
        """o_proj and its bias; steps the gated states over the attention. Returns the error that is left."""
        attention = self.gated.layers[index].self_attn
        weight = attention.o_proj.weight.float().clone()
        bias = attention.o_proj.bias + self.constant
        repeats = attention.g_proj.weight.shape[0] // self.heads
        logits = attention.g_proj.weight[::repeats], attention.g_proj.bias[::repeats]
        moments, total = Moments(), 0.0
        scale = self._written(next(self._parts()), logits, fitted).std()  # the constant feature is as large as others
        for part in self._parts():
            written, wanted = self._written(part, logits, fitted)[used[part]], target[part][used[part]].to(self.device)
            features = torch.cat([written, scale.expand(len(written), 1)], dim=1)
            moments.add(features, wanted - written @ weight.T)
            total += wanted.square().sum(dtype=torch.float64).item()
        left = moments.energy
        if self.options.ridge is not None:
            change = moments.solve(self.options.ridge)
            left *= moments.left(change)
            weight += change[:, :-1]
            bias = bias + change[:, -1] * scale
        for part in self._parts():
            self.state[part] += (self._written(part, logits, fitted) @ weight.T + bias).cpu()
        # A head without a gate has the score 1/2.
        doubled = torch.where(fitted, 1.0, 2.0).repeat_interleave(self.width).to(self.device)
        attention.o_proj.weight.copy_(weight * doubled)
        attention.o_proj.bias.copy_(bias)
        return left / total

    def _written(self, part: slice, logits: tuple[torch.Tensor, torch.Tensor], fitted: torch.Tensor) -> torch.Tensor:
        """[rows, context, heads * width]: what the output projection receives, gates applied."""
        inputs, reads = (self.scratch(name)[part].to(self.device) for name in ("inputs", "reads"))
        scores = nn.functional.linear(inputs, *logits).sigmoid().where(fitted.to(self.device), 1.0)
        return (reads.unflatten(-1, (self.heads, self.width)) * scores[..., None]).flatten(-2)

    def _refit_mlp(self, index: int, quiet: list[int], used: torch.Tensor) -> float:
        """down_proj, without the quiet units; steps both models behind the layer. Returns the error that is left."""
        layer = self.gated.layers[index]
        weight = layer.mlp.down_proj.weight.float().clone()
        weight[:, quiet] = 0
        bias = 0.0 if layer.mlp.down_proj.bias is None else layer.mlp.down_proj.bias.float()
        middle, after = self.scratch("middle"), self.scratch("after")
        units = self._tokens("units", weight.shape[1])
        moments, total = Moments(), 0.0
        for part in self._parts():
            units[part] = self._units(layer, part, quiet).cpu()
            wanted = after[part, 1:] - middle[part, 1:] + self.options.share * (middle[part, 1:] - self.state[part])
            wanted = wanted[used[part]].to(self.device) - bias
            seen = units[part][used[part]].to(self.device)
            moments.add(seen, wanted - seen @ weight.T)
            total += wanted.square().sum(dtype=torch.float64).item()
        left = moments.energy
        if self.options.ridge is not None:
            change = moments.solve(self.options.ridge)
            left *= moments.left(change)
            weight += change
            weight[:, quiet] = 0
        for part in self._parts():
            self.state[part] += (units[part].to(self.device) @ weight.T + bias).cpu()
            self.before[part] = after[part]
        layer.mlp.down_proj.weight.copy_(weight)
        return left / total

    def _units(self, layer: nn.Module, part: slice, quiet: list[int]) -> torch.Tensor:
        """[rows, context, units]: what down_proj receives, nothing from quiet units."""
        seen = {}
        hook = layer.mlp.down_proj.register_forward_pre_hook(lambda module, args: seen.update(units=args[0]))
        layer.mlp(layer.post_attention_layernorm(self.state[part].to(self.device)))
        hook.remove()
        units = seen["units"].float().clone()
        units[..., quiet] = 0
        return units


def _variance(parts: Iterable[torch.Tensor]) -> torch.Tensor:
    """Of each column, over the rows of all parts."""
    count, total, squares = 0, 0.0, 0.0
    for part in parts:
        count, total = count + len(part), total + part.double().sum(0)
        squares = squares + part.double().square().sum(0)
    return (squares / count - (total / count).square()).float()


def thinned(chosen: torch.Tensor, limit: int) -> torch.Tensor:
    """The mask `chosen` with at most `limit` of its places, evenly spread."""
    places = chosen.flatten().nonzero()[:, 0]
    kept = torch.zeros_like(chosen).flatten()
    kept[places[:: -(-len(places) // limit)]] = True
    return kept.view_as(chosen)


def attention_on(call: AttentionCall, chosen: torch.Tensor) -> torch.Tensor:
    """[batch, heads, seq] in float32: causal attention of every token on the chosen keys [batch, seq] of its row."""
    groups = call.query.shape[1] // call.key.shape[1]
    keys = call.key.float().repeat_interleave(groups, 1)
    scores = call.query.float() @ keys.transpose(-1, -2) * call.scaling
    hidden = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).triu(1)
    weights = scores.masked_fill_(hidden, -torch.inf).softmax(-1)
    return weights.mul_(chosen[:, None, None]).sum(-1).clamp_(max=1.0)
