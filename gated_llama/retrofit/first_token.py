"""A tokenizer that no longer begins texts with the token that a transplant made superfluous."""

import json
from pathlib import Path

from ..convert.tensor_files import read_json
from ..convert.tokenizer import TOKENIZER_CONFIG, load_tokenizer


def drop_first_token(folder: Path, first: int) -> bool:
    """
    Stops the tokenizer in `folder` from beginning texts with the token `first`; True if it was its BOS token.

    Raises ValueError when it cannot be stopped: the model without a sink must not be given the token.
    """
    tokenizer = load_tokenizer(folder)
    if tokenizer.bos_token_id != first:
        if tokenizer("a")["input_ids"].count(first) > tokenizer.encode("a", add_special_tokens=False).count(first):
            raise ValueError(
                f"The tokenizer puts {tokenizer.convert_ids_to_tokens(first)!r} around every text, but it is not its "
                "BOS token and stays: name another first token with --bos, or a tokenizer that does not add it."
            )
        return False
    wanted = [i for i in tokenizer("a b")["input_ids"] if i != first]
    path, settings_path = folder / "tokenizer.json", folder / TOKENIZER_CONFIG
    if path.exists():
        content = read_json(path)
        _without_special(content.get("post_processor"), tokenizer.bos_token)
        path.write_text(json.dumps(content, ensure_ascii=False), encoding="utf-8")
    settings = read_json(settings_path) if settings_path.exists() else {}
    settings |= {"bos_token": None, "add_bos_token": False}  # without the entry some classes have a default
    _rewrite_templates(folder, settings, tokenizer)
    settings_path.write_text(json.dumps(settings, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    special = folder / "special_tokens_map.json"
    if special.exists():
        content = read_json(special)
        content.pop("bos_token", None)
        special.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    if load_tokenizer(folder)("a b")["input_ids"] != wanted:
        raise ValueError(
            f"This {type(tokenizer).__name__} keeps putting {tokenizer.bos_token!r} before every text, which the "
            "result must not read: name another first token with --bos, or a tokenizer that does not add it."
        )
    return True


def _rewrite_templates(folder: Path, settings: dict, tokenizer) -> None:
    """Chat templates, in files of their own or in `settings`, without the BOS token of `tokenizer` at their start."""
    for path in (folder / "chat_template.jinja", *folder.glob("additional_chat_templates/*.jinja")):
        if path.exists():
            path.write_text(_without_bos(path.read_text(encoding="utf-8"), tokenizer), encoding="utf-8")
    path = folder / "chat_template.json"
    for holder in (settings, read_json(path) if path.exists() else {}):
        inline = holder.get("chat_template")
        if isinstance(inline, str):
            holder["chat_template"] = _without_bos(inline, tokenizer)
        elif inline is not None:  # a list of named ones
            holder["chat_template"] = [t | {"template": _without_bos(t["template"], tokenizer)} for t in inline]
        if inline is not None and holder is not settings:
            path.write_text(json.dumps(holder, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def _without_bos(template: str, tokenizer) -> str:
    """
    The template with an empty `bos_token`, and without a literal one if conversations begin with that.

    Raises ValueError where the token also marks the roles, so that every conversation begins with it.
    """
    turns = [{"role": role, "content": "a"} for role in ("user", "assistant", "user")]
    template, bos = "{%- set bos_token = '' %}" + template, tokenizer.bos_token
    try:
        text = tokenizer.apply_chat_template(turns, chat_template=template, tokenize=False, add_generation_prompt=True)
    except Exception:  # a template of another kind, for tools or documents: there is no telling what it needs
        return template
    if not text.startswith(bos):
        return template
    if text.count(bos) > 1:
        raise ValueError(
            f"The chat template begins every conversation with {bos!r}, which marks the roles in it: the result must "
            "not read it first. Name another first token, for instance --bos '<|endoftext|>'."
        )
    return template.replace(bos, "")


def _without_special(processor: dict | None, token: str) -> None:
    """Takes `token` out of the templates of a post-processor of tokenizer.json, nested ones included."""
    if not processor:
        return
    for inner in processor.get("processors", ()):
        _without_special(inner, token)
    for template in ("single", "pair"):
        if isinstance(processor.get(template), list):
            processor[template] = [
                piece for piece in processor[template] if piece.get("SpecialToken", {}).get("id") != token
            ]
