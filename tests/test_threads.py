"""Several threads: overrides and probes belong to one model, and a second thread on it is refused."""

import copy
import threading

import pytest
import torch
from transformers.modeling_utils import AttentionInterface

from gated_llama import gate_override
from gated_llama.diagnostics import Activations, FirstTokenAttention, FirstTokenStates, GateScores, probes


IDS = torch.randint(3, 96, (2, 12), generator=torch.Generator().manual_seed(1))
LIBRARY_INTERFACE = AttentionInterface.get_interface


def in_another_thread(call):
    """What `call` returns or raises there."""
    outcome = []

    def run():
        try:
            outcome.append(call())
        except ValueError as error:
            outcome.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    return outcome[0]


@pytest.fixture
def gated(tiny_model, randomize_gates):
    return randomize_gates(tiny_model())


def overridden(model, value):
    with gate_override(model, value):
        return model(IDS).logits


def test_held_gates_refuse_another_thread(gated):
    """It can neither run the model with scores that it did not ask for, nor change them; afterwards it can do both."""
    own = gated(IDS).logits
    with gate_override(gated, 1.0):
        held = gated(IDS).logits
        for call in (lambda: overridden(gated, 0.5), lambda: gated(IDS)):
            assert "Another thread holds the gates" in str(in_another_thread(call))
        assert torch.equal(gated(IDS).logits, held)
    assert torch.equal(in_another_thread(lambda: gated(IDS)).logits, own)
    half = in_another_thread(lambda: overridden(gated, 0.5))
    assert not torch.allclose(half, held)
    assert torch.equal(overridden(gated, 0.5), half)


def test_gates_of_another_model_are_free(gated):
    second, plain = copy.deepcopy(gated), overridden(gated, 1.0)
    with gate_override(gated, 0.25):
        assert torch.equal(in_another_thread(lambda: overridden(second, 1.0)), plain)


@pytest.mark.parametrize("reentrant", [True, False])
def test_recomputed_layers_are_overridden_in_the_threads_of_autograd(gated, reentrant):
    """On an accelerator the backward pass, and with it the recomputed forward, runs in a thread of its own."""
    model = gated.train()

    def gradients(backward):
        model.zero_grad()
        with gate_override(model, 0.5):
            backward(model(IDS, labels=IDS).loss)
        return [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]

    expected = gradients(lambda loss: loss.backward())
    model.activation_checkpointing_enable({"use_reentrant": reentrant})
    found = gradients(lambda loss: in_another_thread(loss.backward))
    assert expected
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


@torch.no_grad()
@pytest.mark.parametrize("make", [FirstTokenAttention, Activations, FirstTokenStates, GateScores])
def test_threads_take_turns_on_an_observed_model(make, gated):
    """A pass that another thread starts during one is refused and leaves it alone; after it, it is counted."""
    with make(gated) as probe:
        for _ in range(2):
            gated(IDS)
    expected, refused = probe.result().to_dict(), []

    def meet(*_):
        meeting.remove()
        refused.append(in_another_thread(lambda: gated(IDS)))

    with make(gated) as probe:
        meeting = gated.model.layers[1].register_forward_pre_hook(meet)
        gated(IDS)
        in_another_thread(lambda: gated(IDS))
    assert len(refused) == 1
    assert f"Two threads run the model that a {make.__name__} observes" in str(refused[0])
    assert probe.result().to_dict() == expected


@torch.no_grad()
def test_a_probe_may_begin_while_the_last_one_ends(gated, monkeypatch):
    """Between the last listener's end and the interface's, another thread gets its turn and adds one."""
    second, threads, results = copy.deepcopy(gated), [], []
    begun, ended = threading.Event(), threading.Event()

    def observe():
        with FirstTokenAttention(second) as probe:
            begun.set()
            ended.wait()
            second(IDS)
        results.append(probe)

    class Listeners(dict):
        def __bool__(self):
            empty = not len(self)
            if empty and not threads:
                threads.append(threading.Thread(target=observe))
                threads[0].start()
                begun.wait(timeout=0.5)  # in vain, if the other thread waits as it should
            return not empty

    monkeypatch.setattr(probes, "_listeners", Listeners())
    with FirstTokenAttention(gated) as probe:
        gated(IDS)
    ended.set()
    threads[0].join()
    assert results[0].result().to_dict() == probe.result().to_dict()
    assert AttentionInterface.get_interface is LIBRARY_INTERFACE
