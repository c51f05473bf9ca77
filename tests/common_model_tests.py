"""
Runs Transformers' common model tests on gated models, with Qwen3 as the control, and prints a table of counts.

    python tests/common_model_tests.py [-k EXPRESSION] [--fresh]

The tests are those of the installed version: pip fetches its source distribution, and they are kept in the user's
cache directory. What the distribution leaves out (tests of `generate`, of exporters and of pipelines) is not run.
Exit code 0: nothing failed, and what is skipped, the control skips too or EXPECTED_SKIPS says why; 1: not so; 2: there
are no tests to run.
"""

import argparse
import collections
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import time
from importlib.metadata import version
from pathlib import Path
from xml.etree import ElementTree


# Modules that the distribution leaves out -> names in common_model_shims.py.
LEFT_OUT = {
    "exporters/test_export": "ExportTesterMixin",
    "generation/test_utils": "GenerationTesterMixin",
    "utils/test_configuration_utils": "config_common_kwargs",
    "distributed_testing_utils": (
        "_get_distributed_backend, _get_distributed_device_type, _get_rank_device, _set_rank_device, "
        "_start_rank_processes, run_distributed"
    ),
}
CONTROL = "Qwen3"
# Tests that a gated model skips and the control passes -> why.
EXPECTED_SKIPS = {}


class CannotFetch(Exception):
    pass


def pip(*arguments):
    result = subprocess.run([sys.executable, "-m", "pip", *arguments], capture_output=True, text=True)
    if result.returncode:
        lines = [line for line in result.stderr.splitlines() if line.startswith("ERROR")] or ["no output"]
        raise CannotFetch(f"pip {' '.join(arguments[:1])} failed: {lines[-1]}")


def fetched(fresh: bool) -> Path:
    """A folder with the package `transformers_tests` of the installed version and what it imports."""
    release = version("transformers")
    cache = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache"), "gated-llama", f"transformers-{release}")
    if fresh:
        shutil.rmtree(cache, ignore_errors=True)
    if cache.is_dir():
        return cache
    cache.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=cache.parent) as folder:
        archive, site = Path(folder, "archive"), Path(folder, "site")
        pip("download", "--no-deps", "--no-binary", "transformers", "-d", str(archive), f"transformers=={release}")
        pip("install", "--no-deps", "--target", str(site), "parameterized")
        with tarfile.open(next(archive.glob("*.tar.gz"))) as tar:
            tar.extractall(folder, filter="data")
        tests = next(Path(folder).glob("transformers-*/tests")).rename(site / "transformers_tests")
        for name, names in LEFT_OUT.items():
            module = tests / f"{name}.py"
            module.parent.mkdir(exist_ok=True)
            module.write_text(f"from common_model_shims import {names}\n")
        for package in {tests, *(module.parent for module in tests.rglob("*.py"))}:
            (package / "__init__.py").touch()
        site.rename(cache)
    return cache


def run(site: Path, expression: str | None) -> list[ElementTree.Element]:
    """The test cases of a run, as pytest reports them."""
    here = Path(__file__).parent
    paths = os.pathsep.join(map(str, (here.parent, here, site)))
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder, "report.xml")
        options = ["-p", "no:cacheprovider", "-c", os.devnull, "--rootdir", folder, f"--junitxml={report}", "-v"]
        selection = ["-k", expression] if expression else []
        command = [sys.executable, "-m", "pytest", *options, *selection, str(here / "common_model_cases.py")]
        environment = {**os.environ, "PYTHONPATH": paths, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
        subprocess.run(command, env=environment, cwd=folder)
        return list(ElementTree.parse(report).iter("testcase"))


def outcome(case: ElementTree.Element) -> str:
    tags = {child.tag for child in case}
    return "failed" if tags & {"failure", "error"} else "skipped" if "skipped" in tags else "passed"


def table(outcomes: dict[str, dict[str, str]]) -> str:
    """Counts by setting; outcomes: setting -> test -> outcome."""
    lines = [f"{'setting':<18}{'passed':>8}{'failed':>8}{'skipped':>9}"]
    for setting, tests in outcomes.items():
        count = collections.Counter(tests.values())
        lines.append(f"{setting:<18}{count['passed']:>8}{count['failed']:>8}{count['skipped']:>9}")
    return "\n".join(lines)


def report(cases: list[ElementTree.Element]) -> bool:
    """Prints the table and what is not as in the control; whether that is nothing."""
    outcomes, skips = collections.defaultdict(dict), collections.defaultdict(collections.Counter)
    for each in cases:
        setting, test = each.get("classname").rsplit(".", 1)[-1].removesuffix("Test"), each.get("name")
        outcomes[setting][test] = outcome(each)
        if outcome(each) == "skipped":
            skips[re.sub(r"<class '\S+\.(\w+)'>", r"\1", each.find("skipped").get("message"))][setting] += 1
    print("\n" + table(outcomes), "\nSkipped, with the tests' own reason:", sep="\n")
    for reason, settings in sorted(skips.items()):
        print(f"  {reason}: " + ", ".join(f"{name} {count}" for name, count in settings.items()))
    control = outcomes.get(CONTROL, {})
    odd = [
        (setting, test, found)
        for setting, tests in outcomes.items()
        for test, found in tests.items()
        if found == "failed" or (found == "skipped" and control.get(test) == "passed")
    ]
    print("Failed, or skipped where the control passes:" + " none" * (not odd))
    for setting, test, found in odd:
        print(f"  {found}: {setting}.{test} {EXPECTED_SKIPS.get(test, '')}")
    return all(found == "skipped" and test in EXPECTED_SKIPS for _, test, found in odd)


def main() -> int:
    parser = argparse.ArgumentParser(description="Transformers' common model tests on gated models.")
    parser.add_argument("-k", dest="expression", help="as pytest's: only these tests")
    parser.add_argument("--fresh", action="store_true", help="fetch the tests again")
    options = parser.parse_args()
    try:
        site = fetched(options.fresh)
    except CannotFetch as error:
        print(f"The common model tests of transformers {version('transformers')} cannot be fetched: {error}")
        return 2
    begin = time.monotonic()
    cases = run(site, options.expression)
    as_expected = report(cases)
    print(f"{len(cases)} tests in {time.monotonic() - begin:.0f} s")
    return 0 if cases and as_expected else 1


if __name__ == "__main__":
    sys.exit(main())
