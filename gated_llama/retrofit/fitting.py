"""The two fits of a transplant: gates whose gated sum matches an output, and linear maps that take up what is left."""

from typing import NamedTuple

import torch
from torch import nn


class GateFit(NamedTuple):
    """
    weight [heads, hidden] and bias [heads] of the logits. r2 [heads]: share of the variance of the survivors that the
    scores explain. error: `GateProblem.error` with the fitted scores.
    """

    weight: torch.Tensor
    bias: torch.Tensor
    r2: torch.Tensor
    error: float


class GateProblem(NamedTuple):
    """
    Least squares in the scores g of one layer, a quadratic form per token: g' gram g - 2 moment' g + energy.

    It is |sum_h g_h m_h - target|^2 for what head h would write ungated, m_h [hidden]: gram [tokens, heads, heads]
    holds m_h . m_k, moment [tokens, heads] m_h . target, energy [tokens] |target|^2, in products that may weigh the
    hidden dimensions. inputs [tokens, hidden]: what the gate sees. survivors [tokens, heads]: attention of the source
    that is not on a sink; 1 - a_0 where the first token is the only one.
    """

    inputs: torch.Tensor
    gram: torch.Tensor
    moment: torch.Tensor
    energy: torch.Tensor
    survivors: torch.Tensor

    def error(self, scores: torch.Tensor) -> torch.Tensor:
        """Mean over tokens of the squared distance, over the mean energy."""
        quadratic = torch.einsum("th,thk,tk->t", scores, self.gram, scores)
        return (quadratic - 2 * (self.moment * scores).sum(-1) + self.energy).mean() / self.energy.mean()


@torch.no_grad()
def fit_gates(
    problem: GateProblem, fitted: torch.Tensor, *, likeness: float = 0.02, decay: float = 1e-4, steps: int = 60
) -> GateFit:
    """
    Scores sigmoid(x W + b) that minimise `problem.error` + likeness * cross-entropy(survivors, scores)
    + decay * |W|^2 / heads, with W of the standardised inputs.

    fitted [heads] bool: the others keep the score 1. The cross-entropy ties the scores to what they stand for where
    the output does not care. L-BFGS from the constant gate with the mean of the survivors: deterministic.
    """
    scale, centre = problem.inputs.std(0).clamp_min(1e-6), problem.inputs.mean(0)
    inputs = (problem.inputs - centre) / scale
    start = torch.logit(problem.survivors.mean(0).clamp(0.02, 0.98))
    weight, bias = torch.zeros(len(fitted), inputs.shape[1], device=inputs.device), start.clone()
    optimiser = torch.optim.LBFGS(
        [weight.requires_grad_(), bias.requires_grad_()],
        max_iter=steps,
        history_size=10,
        line_search_fn="strong_wolfe",
        tolerance_change=1e-7,
    )

    @torch.no_grad()
    def loss() -> torch.Tensor:
        total, slope = loss_and_slope(problem, nn.functional.linear(inputs, weight, bias), fitted, likeness)
        # In this order: products whose *result* is narrow, [hidden, heads], are several times as slow.
        weight.grad, bias.grad = slope.T @ inputs + 2 * decay / len(fitted) * weight, slope.sum(0)
        return total + decay * weight.square().sum() / len(fitted)

    optimiser.step(loss)
    scores = nn.functional.linear(inputs, weight, bias).sigmoid().where(fitted, 1.0)
    spread = (problem.survivors - problem.survivors.mean(0)).square().sum(0)
    r2 = 1 - (scores - problem.survivors).square().sum(0) / spread  # nan for survivors that never vary
    r2 = r2.where(spread > 0, torch.nan)
    weight = weight.detach() / scale
    return GateFit(weight, bias.detach() - weight @ centre, r2, problem.error(scores).item())


def loss_and_slope(
    problem: GateProblem, logits: torch.Tensor, fitted: torch.Tensor, likeness: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """
    What `fit_gates` minimises, but for the decay, and its gradient in the logits [tokens, heads].

    By hand, since it is the inner loop of a transplant; a test compares it with autograd.
    """
    free = logits.sigmoid()
    scores = free.where(fitted, 1.0)
    reached = torch.einsum("thk,tk->th", problem.gram, scores)
    energy = problem.energy.sum()
    total = ((scores * (reached - 2 * problem.moment)).sum() + energy) / energy
    slope = 2 / energy * (reached - problem.moment) * free * (1 - free)
    if likeness and fitted.any():
        entropy = nn.functional.binary_cross_entropy_with_logits
        total = total + likeness * entropy(logits[:, fitted], problem.survivors[:, fitted])
        slope = slope + likeness / logits[:, fitted].numel() * (free - problem.survivors)
    return total, slope.where(fitted, 0.0)


class Moments:
    """Second moments of features and residuals, summed over batches of tokens, and the ridge regression from them."""

    def __init__(self):
        self.gram = self.cross = 0.0
        self.energy = 0.0

    def add(self, features: torch.Tensor, residual: torch.Tensor) -> None:
        """features [tokens, p], residual [tokens, q]."""
        self.gram = self.gram + (features.T @ features).double()
        self.cross = self.cross + (features.T @ residual).double()
        self.energy += residual.square().sum(dtype=torch.float64).item()

    def solve(self, ridge: float) -> torch.Tensor:
        """The map [q, p] that minimises |residual - features D'|^2 + ridge * mean(diag gram) * |D|^2, in float32."""
        damped = self.gram + ridge * self.gram.diagonal().mean() * torch.eye(len(self.gram)).to(self.gram)
        return torch.linalg.solve(damped, self.cross).T.float()

    def left(self, change: torch.Tensor) -> float:
        """Share of the residuals' energy that is left after the map."""
        change = change.double().T
        explained = 2 * (self.cross * change).sum() - (change * (self.gram @ change)).sum()
        return 1 - (explained / self.energy).item() if self.energy else 0.0
