"""HumanEval: completed programs are run against their tests, each in a process of its own."""

import os
import resource
import subprocess
import sys
import tempfile


TIMEOUT = 10  # seconds
MEMORY = 4 * 2**30  # bytes


def complete(responses: list[list[str]], docs: list[dict]) -> list[list[str]]:
    """Filter of the harness: prompt and completion together are the program."""
    return [[doc["prompt"] + text for text in texts] for texts, doc in zip(responses, docs, strict=True)]


def pass_at_1(references: list[str], predictions: list[list[str]]) -> float:
    """
    Share of programs that pass their tests, 0 to 1.

    Programs get limits of time and memory, an empty directory and no environment, but they run with the user's rights:
    this is no sandbox. The harness therefore asks for `--confirm_run_unsafe_code` before such a task starts.
    """
    passed = [passes(program[0], tests) for program, tests in zip(predictions, references, strict=True)]
    return sum(passed) / len(passed)


def passes(program: str, tests: str) -> bool:
    with tempfile.TemporaryDirectory() as folder:
        try:
            done = subprocess.run(
                [sys.executable, "-I", "-c", f"{program}\n{tests}\n"],
                cwd=folder,
                env={"PATH": os.defpath},
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                timeout=TIMEOUT,
                preexec_fn=_limit_memory,
                check=False,
            )
        except subprocess.TimeoutExpired:
            return False
    return done.returncode == 0


def _limit_memory() -> None:
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
