"""`gated-llama eval` and `python -m gated_llama.evaluation`: the harness's flags, and a few of our own."""

import argparse
import json
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from huggingface_hub.errors import StrictDataclassError
from lm_eval.config.evaluate_config import EvaluatorConfig
from lm_eval.utils import handle_non_serializable, make_table, setup_logging

from ..convert.tensor_files import one_line, to_json
from ..diagnostics.figures import new_figure
from .card import add_results, check_folder
from .compare import Comparison, compare
from .harness import BOS_POLICIES, probe_names
from .report import to_markdown, write
from .run import MODEL_CLASS, Job, load, parse, run


def evaluate_command(
    model: str | None,
    harness_arguments: Sequence[str],
    *,
    against: str | None = None,
    probes: str = "",
    data_roots: Sequence[str] = (),
    bos: str = "auto",
    noise_floor: str = "auto",
    card: bool = False,
    show: Callable[[str], None],
) -> None:
    """
    Evaluates a model as `lm_eval run` would, or compares it with a base.

    Args:
        model: Hub id, folder or .gguf file; None when `--model_args pretrained=...` names it.
        harness_arguments: flags of `lm_eval run`.
        against: the base to compare with.
        probes: collectors, such as `"gates,sink"`.
        data_roots: folders with data sets under their Hub ids.
        bos: policy for the beginning of requests; several, separated by commas, for a comparison under each.
        noise_floor: dtype of the base's second run when comparing, or `"off"`.
        card: write the scores into the model card of the evaluated folder.
        show: prints text.

    Raises:
        ValueError: a request that cannot be met; the message says what to do.
        ImportError: a package that the request needs is not installed.
    """
    if model is not None and model.startswith("-"):
        raise ValueError(f"No model was named: give MODEL before all options, {model} among them.")
    os.environ.setdefault("LMEVAL_LOG_LEVEL", "WARNING")  # the harness's own is INFO
    setup_logging()
    named = [] if model is None else ["--model", MODEL_CLASS, "--model_args", json.dumps({"pretrained": model})]
    config = parse([*named, *harness_arguments])
    names, policies = probe_names(probes), [policy.strip() for policy in bos.split(",")]
    if "" in policies or len(set(policies)) < len(policies):
        raise ValueError(f"--bos {bos!r} names a policy twice, or an empty one: give each once, as in auto,none.")
    if config.model == MODEL_CLASS:
        if not config.model_args.get("pretrained"):
            raise ValueError("No model was named: give MODEL first, or --model_args pretrained=MODEL.")
        if against is None:
            config.model_args |= {"bos": policies[0]} if policies != ["auto"] else {}
            config.model_args |= {"probes": names} if names else {}
    elif names or policies != ["auto"] or against:
        raise ValueError(f"--probes, --bos and --against belong to the model class {MODEL_CLASS}: leave --model out.")
    if against is None and len(policies) > 1:
        raise ValueError(f"--bos {bos} names several policies: that is for --against; choose one of {BOS_POLICIES}.")
    _check_targets(config, against, card)
    job = load(config, data_roots)
    try:
        if against is None:
            results = run(job)
            if results is None:  # not the first process
                return
            show(_tables(results, config.show_config))
        else:
            results = _compare(job, against, names, policies, noise_floor, show)
    except KeyboardInterrupt:
        kept = "the same command goes on from the cache" if config.use_cache else "--use_cache PATH keeps answers"
        sys.stderr.write(f"\nInterrupted; {kept}.\n")
        raise
    if card:
        add_results(Path(config.model_args["pretrained"]), results, job.tasks)


def _check_targets(config: EvaluatorConfig, against: str | None, card: bool) -> None:
    """ValueError for places that results cannot be written to, before anything is computed."""
    if config.output_path and any(p.is_file() for p in (Path(config.output_path), *Path(config.output_path).parents)):
        raise ValueError(f"--output_path {config.output_path} is, or lies below, a file: name a folder.")
    if config.output_path and against is not None:
        new_figure(1, 1)  # a missing matplotlib is told before the work, not after
    if card:
        check_folder(Path(str(config.model_args.get("pretrained"))))
    if against is not None and (config.wandb_args or config.trackio_args):
        raise ValueError("A comparison has no place in wandb or trackio: leave --wandb_args and --trackio_args out.")


def _compare(
    job: Job, against: str, names: list[str], policies: list[str], noise_floor: str, show: Callable[[str], None]
) -> dict[str, Any]:
    """Compares under each policy, prints and writes the report; returns the model's results under the first policy."""
    comparisons = []
    try:
        for policy in policies:
            comparisons.append(
                compare(
                    job,
                    against,
                    bos=policy,
                    probes=names,
                    noise_floor=noise_floor,
                    progress=lambda text: sys.stderr.write(f"{text}\n"),
                )
            )
    finally:
        if comparisons:  # also where a later policy fails
            _report(job, comparisons, show)
    return comparisons[0].results["model"]


def _report(job: Job, comparisons: list[Comparison], show: Callable[[str], None]) -> None:
    show(to_markdown(comparisons))
    if job.config.output_path:
        for path in write(comparisons, Path(job.config.output_path), samples=job.config.log_samples):
            show(str(path))
    else:
        show("Nothing was saved: --output_path FOLDER writes this table, all numbers as JSON, and a picture.")


def _tables(results: dict[str, Any], with_config: bool) -> str:
    tables = [_as_json(results)] if with_config else []
    tables += [make_table(results)] + ([make_table(results, "groups")] if "groups" in results else [])
    probes = results["config"].get("probes", {})
    lines = [f"{task}: {_probe_line(report)}" for task, report in probes.items()]
    return "\n".join([*tables, *lines])


def _as_json(results: dict[str, Any]) -> str:
    shown = {key: value for key, value in results.items() if key != "samples"}
    return to_json(shown, indent=2, default=handle_non_serializable)


def _probe_line(report: dict[str, Any]) -> str:
    """The measurements of one task in one line."""
    parts = [f"{report['tokens']:,} tokens of {report['requests']:,} requests"]
    if report["cached"]:
        parts[0] += f" ({report['cached']:,} more came from the cache and were not measured)"
    if gates := report.get("gate_scores"):
        parts.append(
            f"gates {gates['mean']:.3f} ({gates['share_below']:.0%} below 0.1, {gates['share_above']:.0%} above 0.9)"
        )
    if attention := report.get("first_token_attention"):
        parts.append(f"first-token attention {attention['mean']:.4f}")
    if activation := report.get("max_activation"):
        parts.append(f"M-Act {activation['m_act']:.4g}")
    if report["overhead"] is not None:
        parts.append(f"probes cost {report['overhead']:+.0%} of a forward pass")
    return ", ".join(parts)


def guarded(action: Callable[[], None]) -> int:
    """Exit code of a command: 0, 2 after a mistake of the user's that is told in one line, 130 when interrupted."""
    try:
        action()
    except (ValueError, OSError, ImportError, StrictDataclassError) as error:
        sys.stderr.write(f"Error: {one_line(error)}\n")
        return 2
    except KeyboardInterrupt:
        return 130
    return 0


def main(arguments: Sequence[str]) -> int:
    """`lm_eval run` with gated models known to it and our own flags; returns the exit code, as `gated-llama` does."""
    parser = argparse.ArgumentParser(
        prog="python -m gated_llama.evaluation",
        description="lm_eval run, with the model class gated-llama as its default and these flags in addition.",
        epilog="All other flags are those of `lm_eval run --help`.",
        allow_abbrev=False,
    )
    parser.add_argument("--against", metavar="BASE", help="Compare with this model.")
    parser.add_argument("--probes", default="", help="Measure along: gates, sink, or both separated by a comma.")
    parser.add_argument(
        "--data-root", action="append", default=[], metavar="DIR", help="Data sets under their Hub ids."
    )
    parser.add_argument("--bos", default="auto", help="Beginning of requests: auto, none, always, or a token.")
    parser.add_argument("--noise-floor", default="auto", help="Dtype of the base's second run; off for none.")
    parser.add_argument("--card", action="store_true", help="Write the scores into the folder's model card.")
    ours, rest = parser.parse_known_args(arguments)
    return guarded(
        lambda: evaluate_command(
            None,
            rest,
            against=ours.against,
            probes=ours.probes,
            data_roots=ours.data_root,
            bos=ours.bos,
            noise_floor=ours.noise_floor,
            card=ours.card,
            show=_print,
        )
    )


def _print(text: str) -> None:
    sys.stdout.write(f"{text}\n")
