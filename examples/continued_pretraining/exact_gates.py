"""
What limits a transplant: KL to the source with exact scores for fitted gates: exact_gates.py WORK DATA OUT.json

WORK is what prepare.py made, DATA as for evaluate.py. On one held-out row of each domain the source's own attention
gives the scores that its gated copy would need; the copy has re-centred values and no linear refit. Scores are
1 - a_0, or 1 minus attention on all sinks: the first token and the tokens whose states are massive like its own. Units
that write the massive activations are silenced, or not. "transplant" is WORK's own, with gates that are linear in the
layer's input.
"""

import json

import torch
from evaluate import DOMAINS, arguments, load, rows_of
from torch import nn
from transformers import AutoTokenizer

from gated_llama import gate_override
from gated_llama.diagnostics.corpus import first_token
from gated_llama.diagnostics.probes import attention_modules, listen_to_attention
from gated_llama.retrofit.losses import divergence
from gated_llama.retrofit.surgery import gated_copy
from gated_llama.retrofit.walk import WalkOptions, attention_on


def run_source(source: nn.Module, row: torch.Tensor, first: int) -> dict:
    """Logits behind the first token, v_0 by layer, and by kind of sinks the scores [1, seq, heads, 1] by layer."""
    states, values, scores = {}, {}, {"the first token": {}, "all sinks": {}}

    def listen(call):
        values[call.layer] = call.value[0, :, 0]
        largest = states[call.layer].abs().amax(dim=-1)
        first_only = torch.arange(largest.shape[1])[None] == 0
        massive = largest > WalkOptions().spike * largest[:, 1:].median()
        for kind, sinks in (("the first token", first_only), ("all sinks", first_only | massive)):
            scores[kind][call.layer] = (1 - attention_on(call, sinks))[:, :, 1:].transpose(1, 2)[..., None]

    handles = [
        layer.register_forward_pre_hook(lambda _, args, index=index: states.update({index: args[0]}))
        for index, layer in enumerate(source.model.layers)
    ]
    with listen_to_attention(attention_modules(source), listen):
        logits = source(torch.cat([torch.tensor([first]), row])[None], use_cache=False).logits[0, 1:]
    for handle in handles:
        handle.remove()
    return {"logits": logits, "values": values, "scores": scores}


def recentre(gated: nn.Module, values: dict[int, torch.Tensor]) -> None:
    """v_proj - v_0, and W_O v_0 on the output: with exact scores nothing has changed."""
    for index, value in values.items():
        attention = gated.model.layers[index].self_attn
        attention.v_proj.bias.sub_(value.flatten())
        heads = value.repeat_interleave(gated.config.num_attention_heads // len(value), 0)
        attention.o_proj.bias.add_(attention.o_proj.weight @ heads.flatten())


def silence(gated: nn.Module, writers: list[dict]) -> None:
    for writer in writers:
        gated.model.layers[writer["layer"]].mlp.down_proj.weight[:, writer["unit"]] = 0


def compare(model: nn.Module, rows: dict, runs: dict, kind: str | None) -> dict[str, float]:
    """KL to the source by domain, with the scores of `kind` or the model's own."""
    found = {}
    for domain, row in rows.items():
        run = runs[domain]
        with gate_override(model, run["scores"][kind] if kind else {}):
            logits = model(row[None], use_cache=False).logits[0]
        found[domain] = divergence(logits, run["logits"]).mean().item()
    return found


@torch.no_grad()
def main() -> None:
    options = arguments(__doc__).parse_args()
    models = options.work / "models"
    tokenizer = AutoTokenizer.from_pretrained(models / "plain")
    first = first_token(tokenizer, options.first)
    rows = {domain: rows_of(tokenizer, options.data / domain, 1, options.context)[0] for domain in DOMAINS}
    source = load(options.work, "source")
    runs = {domain: run_source(source, row, first) for domain, row in rows.items()}
    writers = json.loads((models / "transplanted" / "transplant.json").read_text())["sink"]["spike_writers"]
    gated = gated_copy(source, "headwise")
    recentre(gated, runs[DOMAINS[0]]["values"])
    found = {"nothing silenced, the first token": compare(gated, rows, runs, "the first token")}
    silence(gated, writers)
    for kind in ("the first token", "all sinks"):
        found[f"writers silenced, {kind}"] = compare(gated, rows, runs, kind)
    found["transplant"] = compare(load(options.work, models / "transplanted"), rows, runs, None)
    for name, values in found.items():
        print(name, *(f"{domain} {value:.3f}" for domain, value in values.items()), sep="  ")
    options.out.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
