"""
Models and texts for the recipes of this folder, in a folder of their own:

    prepare.py WORK --data DATA [--model MODEL.gguf]     SmolLM2-135M-Instruct, and texts of several domains
    prepare.py WORK --data DATA --tokens 65536           a transplant calibrated on more, which polish_1m starts from
    prepare.py WORK --tiny                               a 260K-parameter model and a short story, in seconds

DATA holds <domain>/train.jsonl (or .jsonl.gz) and literature_en/validation.jsonl, a field "text" on each line. What is
in WORK already stays.
"""

import argparse
import json
import shutil
import subprocess
import sys
from collections.abc import Iterator
from itertools import chain, islice
from pathlib import Path

import yaml

from gated_llama.convert import convert_checkpoint
from gated_llama.diagnostics.corpus import read_documents, read_texts
from gated_llama.retrofit.reading import read_yaml
from gated_llama_cli.demo import find_smollm2


HERE = Path(__file__).parent
STORIES = HERE.parents[1] / "tests" / "data" / "stories260K"
DOMAINS = ("literature_en", "law_en", "wiki_en", "math_en", "code_python", "literature_zh")
# What the transplant is fitted on: so many documents of each, cut to so many characters.
CALIBRATION, CHARACTERS = 40, 4000
TRANSPLANTS = {32768: "transplanted", 65536: "transplanted_65k"}  # by calibration tokens
FIRST_TOKEN = "<|endoftext|>"
MODELS = {
    "plain": {"position": None},
    "identity": {"granularity": "headwise", "policy": "identity"},
    "normal": {"granularity": "headwise", "policy": "normal", "seed": 0},
    "open": {"granularity": "headwise", "policy": "open", "bias": 5.0},
}

# What a recipe becomes on the tiny model, whose tokens and texts are other ones.
TINY = {
    "source": "models/source",
    "source_bos": "<s>",
    "data": {"context": 63, "repeat": True},
    "training": {"max_steps": 6, "warmup_steps": 0, "use_cpu": True},
    "measure": {"every": 3},
}


def documents(data: Path, domain: str, split: str) -> Iterator[str]:
    for name in (f"{split}.jsonl", f"{split}.jsonl.gz"):
        if (data / domain / name).is_file():
            return read_documents(data / domain / name)
    sys.exit(f"{data / domain} has no {split}.jsonl or {split}.jsonl.gz")


def write(path: Path, lines) -> None:
    """JSON lines {"text": ...}; the file appears when it is complete."""
    if path.is_file():
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(".partial")
    with partial.open("w", encoding="utf-8") as file:
        for line in lines:
            file.write(json.dumps({"text": line}, ensure_ascii=False) + "\n")
    partial.rename(path)


def texts(work: Path, data: Path) -> None:
    for domain in DOMAINS:
        write(work / "text" / f"{domain}.jsonl", documents(data, domain, "train"))
        few = islice(documents(data, domain, "train"), CALIBRATION)
        write(work / "calibration" / f"{domain}.jsonl", (text[:CHARACTERS] for text in few))
    write(work / "text" / "held_out.jsonl", islice(documents(data, "literature_en", "validation"), 20))


def tiny_texts(work: Path) -> None:
    paragraphs = read_texts(None)[0][0].split("\n\n")
    for index, domain in enumerate((*DOMAINS, "held_out")):
        write(work / "text" / f"{domain}.jsonl", ["\n\n".join(paragraphs[index::8])])
    write(work / "calibration" / "story.jsonl", ["\n\n".join(paragraphs[7::8])])


def convert(work: Path, source: Path) -> None:
    for name, options in MODELS.items():
        folder = work / "models" / name
        if not folder.is_dir():
            convert_checkpoint(source, folder, **options)


def transplant(work: Path, source: Path, name: str, options: list[str]) -> None:
    folder = work / "models" / name
    if not folder.is_dir():
        files = (["--calibration", str(path)] for path in sorted((work / "calibration").glob("*.jsonl")))
        command = [sys.executable, "-m", "gated_llama_cli", "convert", str(source), str(folder)]
        subprocess.run([*command, "--policy", "transplant", *chain.from_iterable(files), *options], check=True)


def tiny_recipes(work: Path) -> None:
    """Beside the models, a recipe of the same name for each that extends it; run.sh prefers those."""
    for recipe in sorted(HERE.glob("*.yaml")):
        changes = {"extends": str(recipe.resolve()), **TINY}
        if read_yaml(recipe)["student_bos"] != "none":
            changes["student_bos"] = "<s>"
        (work / recipe.name).write_text(yaml.safe_dump(changes, sort_keys=False))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("work", type=Path)
    parser.add_argument("--data", type=Path)
    parser.add_argument("--model", type=Path)
    parser.add_argument(
        "--tokens", type=int, choices=TRANSPLANTS, default=min(TRANSPLANTS), help="of calibration text"
    )
    parser.add_argument("--tiny", action="store_true")
    options = parser.parse_args()
    models = options.work / "models"
    if (models / ("source.gguf" if options.tiny else "source")).exists():
        parser.error(f"{options.work} was made {'without' if options.tiny else 'with'} --tiny: name another folder")
    models.mkdir(parents=True, exist_ok=True)
    if options.tiny:
        source = options.work / "models" / "source"
        if not source.is_dir():
            shutil.copytree(STORIES, source)
        tiny_texts(options.work)
        tiny_recipes(options.work)
    else:
        if options.data is None:
            parser.error("--data DATA is needed: a folder with <domain>/train.jsonl for " + ", ".join(DOMAINS))
        source = options.work / "models" / "source.gguf"
        if not source.exists():
            source.unlink(missing_ok=True)  # a link to what is no longer there
            try:
                source.symlink_to((options.model or Path(find_smollm2())).resolve(strict=True))
            except (ValueError, OSError) as error:
                parser.error(str(error))
        texts(options.work, options.data)
    convert(options.work, source)
    if options.tiny:
        for name in TRANSPLANTS.values():
            transplant(options.work, source, name, ["--tokens", "600", "--context", "63"])
    else:
        chosen = ["--tokens", str(options.tokens), "--bos", FIRST_TOKEN]
        transplant(options.work, source, TRANSPLANTS[options.tokens], chosen)
    print(options.work)


if __name__ == "__main__":
    main()
