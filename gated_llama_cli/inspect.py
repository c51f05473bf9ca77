"""`gated-llama inspect`: what is in a checkpoint, without loading it."""

import json
import shlex
from typing import Annotated

import typer
from rich.markup import escape

from .console import facts, hide_bars, out
from .options import layer_ranges


NO_GATE_WEIGHTS = {
    "states": "none: the gated tensor is its own input",
    "hidden_states": "stored as the model's own format stores them",
}


def register(app: typer.Typer):
    app.command()(inspect)


def inspect(
    model: Annotated[str, typer.Argument(help="Hub id, folder or .gguf file.")],
    revision: Annotated[str | None, typer.Option(help="Branch, tag or commit of a Hub id.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
):
    """Show a checkpoint's gate, its size and what was folded. Reads no weights."""
    hide_bars()
    from gated_llama.convert.inspection import inspect_checkpoint

    found = inspect_checkpoint(model, revision)
    if as_json:
        typer.echo(json.dumps(found.to_dict(), ensure_ascii=False))
    else:
        show(found)
    if found.problems:
        raise typer.Exit(1)


def show(found):
    problems = found.problems[:5]
    if len(found.problems) > 5:
        problems.append(f"and {len(found.problems) - 5} more tensors that do not fit")
    described = {**decoder_rows(found), **(gate_rows(found) if found.gate else offer_rows(found))}
    out.print(facts(found.model, [*described.items(), *(("problem", problem) for problem in problems)]))
    if found.offers:
        command = shlex.join(["gated-llama", "convert", found.model, "OUT"])
        out.print(f"Next: {escape(command)}", soft_wrap=True)


def decoder_rows(found) -> dict[str, str]:
    decoder = found.decoder
    extras = [name for name in ("qk_norm", "qkv_bias", "o_bias", "mlp_bias") if decoder[name]]
    extras += ["tied embeddings"] if decoder["tie_word_embeddings"] else []
    extras += [f"window {decoder['sliding_window']}"] if decoder["sliding_window"] else []
    rope = decoder["rope_parameters"] or {}
    return {
        "type": found.model_type,
        "decoder": f"{decoder['num_hidden_layers']} layers, hidden {decoder['hidden_size']}, "
        f"MLP {decoder['intermediate_size']}, vocabulary {decoder['vocab_size']:,}",
        "heads": f"{decoder['num_attention_heads']} query, {decoder['num_key_value_heads']} key/value, "
        f"{decoder['head_dim']} wide",
        "positions": f"{decoder['max_position_embeddings']:,}, rotary {rope.get('rope_type', 'default')}, "
        f"theta {rope.get('rope_theta', 10000.0):,.0f}",
        "also": ", ".join(extras) or "no biases, no QK-norm, untied embeddings",
        "parameters": f"{found.parameters:,}",
        "stored as": ", ".join(found.dtypes)
        + (" once de-quantised" if found.model.endswith(".gguf") else "")
        + (f", quantised by {found.quantiser}" if found.quantiser else ""),
        "files": ", ".join(f"{name} ({size / 1e6:,.1f} MB)" for name, size in found.files.items()),
    }


def offer_rows(found) -> dict[str, str]:
    if not found.offers:
        return {"gate": "none"}
    offers = [f"{offer.granularity} {offer.gate:,} ({offer.share:.2%})" for offer in found.offers]
    return {"gate": "none", "convert adds": "; ".join(offers)}


def gate_rows(found) -> dict[str, str]:
    gate, (heads, width) = found.gate, found.gate_shape
    switches = {"gate_head_shared": "shared by the heads", "gate_bias": "with bias", "gate_in_fp32": "in float32"}
    lives = [f"{name} {shape}" for name, shape in found.gate_tensors.items()]
    return {
        "gate": ", ".join(
            [
                f"{gate['gate_position']}, {gate['gate_granularity']}, {gate['gate_operation']}",
                f"{gate['gate_activation']} of {gate['gate_input']}",
                *(text for name, text in switches.items() if gate[name]),
            ]
        ),
        "gated layers": f"{layer_ranges(found.gated_layers)} ({len(found.gated_layers)})",
        "scores": f"{heads} head(s) of width {width} for each token",
        "gate weights": ", ".join(lives) or NO_GATE_WEIGHTS[gate["gate_input"]],
        "gate parameters": f"{found.gate_parameters:,} ({found.gate_share:.2%})",
        **retrofit_rows(found.retrofit, found.decoder["num_attention_heads"]),
    }


def retrofit_rows(record: dict | None, heads: int) -> dict[str, str]:
    from gated_llama.hub import heads_at_identity

    if not record:
        return {"start": "not recorded"}
    folded = ", ".join(f"self_attn.{site} x {factor:g}" for site, factor in (record.get("fold") or {}).items())
    if left := heads_at_identity(record.get("identity_heads"), heads):
        folded = f"columns of self_attn.o_proj.weight x 2 for heads at the identity (layer/heads): {left}"
    return {
        "start": f"policy {record.get('policy')}, from a {record.get('source_model_type')} checkpoint",
        "folded": folded or "nothing",
    }
