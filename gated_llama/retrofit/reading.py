"""YAML files as dataclasses: types are checked, unknown keys named with the nearest that is known."""

import dataclasses
import difflib
import re
import types
from pathlib import Path
from typing import Any, Union, get_args, get_origin, get_type_hints

import yaml

from ..convert.tensor_files import one_line


class _Loader(yaml.SafeLoader):
    """YAML as one expects it: `1e-4` is a number, and a key given twice is an error."""

    def construct_mapping(self, node, deep=False):
        merge = "tag:yaml.org,2002:merge"  # `<<: *defaults`, whose keys may be given again
        keys = [self.construct_object(key, deep=True) for key, _ in node.value if key.tag != merge]
        if repeated := sorted({str(key) for key in keys if keys.count(key) > 1}):
            raise ValueError(f"line {node.start_mark.line + 1}: {', '.join(repeated)} is given twice")
        return super().construct_mapping(node, deep)


_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"[-+]?(\d+(\.\d*)?|\.\d+)[eE][-+]?\d+$"), list("-+.0123456789")
)


def read_yaml(path: Path, kind: type | None = None, seen: tuple[Path, ...] = ()) -> dict:
    """
    The keys and values of a file and of those that it extends (`extends: other.yaml`, beside it); its own win.

    Sections are merged key by key. Null takes away a section, an entry of one, or a value that may be None. kind: the
    dataclass that the whole describes; values that stand for a section of it are written out first, so that they merge
    like sections. Raises ValueError for a file that is not there or no YAML, null elsewhere, and a circle.
    """
    if path.resolve() in seen:
        raise ValueError(f"{path} extends itself, through {', '.join(file.name for file in seen)}.")
    if not path.is_file():
        state = "is a folder: name the file in it" if path.is_dir() else "does not exist"
        raise ValueError(f"Configuration {path} {state}.")
    try:
        raw = yaml.load(path.read_text(encoding="utf-8"), _Loader)
    except (yaml.YAMLError, ValueError) as error:  # among them what is not UTF-8
        raise ValueError(f"{path} is not readable YAML: {one_line(error)}") from error
    if not isinstance(raw, dict):
        raise ValueError(f"{path} must hold keys and values, such as `model: DIR`; it holds {type(raw).__name__}.")
    base = raw.pop("extends", None)
    raw = _written_out(kind, raw)
    _refuse_null(path, kind, raw)
    if base is None:
        _refuse_empty(path, kind, raw)
        return _merged({}, raw)
    if not isinstance(base, str):
        raise ValueError(f"{path}: extends must name one file, not {base!r}.")
    return _merged(read_yaml(path.parent / at_home(base), kind, (*seen, path.resolve())), raw)


def _refuse_empty(path: Path, kind: type | None, raw: dict) -> None:
    """ValueError for a named section (a loss, a text) that is null where there is none to take away."""
    named = [key for key, hint in get_type_hints(kind).items() if get_origin(hint) is dict] if kind else []
    for key in named:
        section = raw.get(key)
        if empty := [name for name, value in section.items() if value is None] if isinstance(section, dict) else []:
            raise ValueError(f"{path}: {key}.{empty[0]} is empty: give it a value, or leave it out.")


def _refuse_null(path: Path, kind, value, place: str = "") -> None:
    """ValueError for null where only a value makes sense: it would mean the default, and reads like none."""
    if not isinstance(value, dict):
        return
    kinds = _kinds(kind, value)
    for key, item in value.items():
        # Defaults of a dataclass are attributes of the class.
        if item is None and kinds.get(key) in (str, float, int, bool, int | float) and hasattr(kind, key):
            raise ValueError(f"{path}: {place}{key} is empty: give it a value, or leave it out.")
        _refuse_null(path, kinds.get(key), item, f"{place}{key}.")


def _merged(base: dict, own: dict) -> dict:
    result = dict(base)
    for key, value in own.items():
        below = result.get(key) if isinstance(result.get(key), dict) else {}
        result[key] = _merged(below, value) if isinstance(value, dict) else value
    return {key: value for key, value in result.items() if value is not None}


def _written_out(annotation, value):
    """`value` with {SHORTHAND: plain value} for each plain value that stands for a dataclass."""
    shorthand = getattr(annotation, "SHORTHAND", None)
    if shorthand and value is not None and not isinstance(value, dict):
        return {shorthand: value}
    if not isinstance(value, dict):
        return value
    kinds = _kinds(annotation, value)
    return {key: _written_out(kinds.get(key), item) for key, item in value.items()}


def _kinds(annotation, keys) -> dict[str, Any]:
    """The annotations of what stands under `keys` of a section."""
    if dataclasses.is_dataclass(annotation):
        return get_type_hints(annotation)
    return {key: _kind_of(get_args(annotation)[1], key) for key in keys} if get_origin(annotation) is dict else {}


def _kind_of(annotation, name):
    """The subclass that `name` chooses; a name that chooses none is told when the whole is built."""
    try:
        return annotation.kind(name)
    except (AttributeError, ValueError):
        return annotation


def at_home(value):
    """Values that begin with ~/, wherever they stand, as paths below the home folder."""
    if isinstance(value, dict):
        return {name: at_home(item) for name, item in value.items()}
    if isinstance(value, list):
        return [at_home(item) for item in value]
    return str(Path(value).expanduser()) if isinstance(value, str) and value.startswith("~/") else value


def build(annotation, value, place: str = ""):
    """
    `value` as `annotation` asks: dataclasses from mappings, a list or dict of them, plain types as they are.

    A dataclass may have a `kind`, which chooses a subclass by the key in a dict. Raises ValueError that names `place`.
    """
    if annotation is Any:
        return value
    if dataclasses.is_dataclass(annotation):
        return _build_dataclass(annotation, value, place)
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin in (Union, types.UnionType):
        return _build_union(arguments, value, place)
    if origin is list and isinstance(value, list):
        return [build(arguments[0], item, f"{place}[{index}]") for index, item in enumerate(value)]
    if origin is dict and isinstance(value, dict):
        choose = getattr(arguments[1], "kind", lambda name: arguments[1])
        return {str(name): build(choose(str(name)), item, f"{place}.{name}") for name, item in value.items()}
    if annotation is float and type(value) in (int, float):
        return float(value)
    if type(value) is annotation:
        return value
    raise ValueError(f"{place}={value!r} must be {_words(annotation)}.")


def _build_union(arguments, value, place: str):
    if type(value) in arguments:
        return value
    rest = [argument for argument in arguments if argument is not types.NoneType]
    if len(rest) == 1:
        return build(rest[0], value, place)
    raise ValueError(f"{place}={value!r} must be {' or '.join(map(_words, rest))}.")


def _build_dataclass(kind, value, place: str):
    value = {} if value is None else value
    fields = {field.name: field for field in dataclasses.fields(kind)}
    if not isinstance(value, dict):
        raise ValueError(f"{place}={value!r} must hold keys and values: {', '.join(fields)}.")
    prefix = f"{place}." if place else ""
    for name in value:
        check_name(str(name), fields, f"{prefix}{name}" if prefix else f"key {name!r}")
    for name, field in fields.items():
        optional = field.default is not dataclasses.MISSING or field.default_factory is not dataclasses.MISSING
        if not optional and value.get(name) is None:
            raise ValueError(f"{prefix}{name} is missing.")
    hints = get_type_hints(kind)
    return kind(**{name: build(hints[name], item, f"{prefix}{name}") for name, item in value.items()})


def check_name(name: str, known, place: str) -> None:
    """ValueError for a name that is not known, with the nearest that is."""
    if name not in known:
        near = difflib.get_close_matches(name, list(known), n=1, cutoff=0.5)
        hint = f"did you mean {near[0]!r}?" if near else f"known are {', '.join(known)}."
        raise ValueError(f"{place} is unknown: {hint}")


def _words(annotation) -> str:
    names = {float: "a number", int: "an integer", str: "a text", bool: "true or false"}
    names |= {list: "a list", dict: "a section of keys and values"}
    return names.get(get_origin(annotation) or annotation, str(annotation))
