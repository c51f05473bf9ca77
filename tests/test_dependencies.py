"""constraints.txt, pyproject.toml and what is installed: every version fits everything that asks for it."""

import importlib.metadata
import tomllib
from collections.abc import Iterable, Iterator
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name


ROOT = Path(__file__).parents[1]

PINS = {
    canonicalize_name(name): version
    for name, version in (
        line.split("==")
        for line in (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
        if line.strip() and not line.startswith("#")
    )
}


def installed(name: str) -> importlib.metadata.Distribution | None:
    try:
        return importlib.metadata.distribution(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def applies(requirement: Requirement, extras: Iterable[str]) -> bool:
    return requirement.marker is None or any(requirement.marker.evaluate({"extra": extra}) for extra in ("", *extras))


def direct() -> list[tuple[str, Requirement]]:
    """What pyproject.toml asks for, the extras that are installed (all of whose packages are) included."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    parts = {"gated-llama": project["dependencies"]} | {
        f"gated-llama[{extra}]": lines for extra, lines in project["optional-dependencies"].items()
    }
    asked = {who: [Requirement(line) for line in lines] for who, lines in parts.items()}
    return [
        (who, requirement)
        for who, requirements in asked.items()
        if who == "gated-llama" or all(installed(requirement.name) for requirement in requirements)
        for requirement in requirements
        if canonicalize_name(requirement.name) != "gated-llama"
    ]


def asked_for(first: list[tuple[str, Requirement]]) -> Iterator[tuple[str, Requirement]]:
    """(who asks, requirement): these and all that follow from them, as far as packages are installed."""
    waiting, seen = list(first), set()
    while waiting:
        who, requirement = waiting.pop()
        yield who, requirement
        key = (canonicalize_name(requirement.name), frozenset(requirement.extras))
        found = installed(requirement.name)
        if key in seen or found is None:
            continue
        seen.add(key)
        below = map(Requirement, found.requires or [])
        waiting += [(requirement.name, each) for each in below if applies(each, requirement.extras)]


def test_every_pin_fits_everything_that_asks_for_it():
    wrong = [
        f"{who} asks for {requirement}, and constraints.txt pins {PINS[name]}"
        for who, requirement in asked_for(direct())
        if (name := canonicalize_name(requirement.name)) in PINS
        and not requirement.specifier.contains(PINS[name], prereleases=True)
    ]
    assert not wrong


def test_every_installed_version_fits_everything_that_asks_for_it():
    requirements = list(asked_for(direct()))
    assert len(requirements) > len(direct()) > 6
    wrong = []
    for who, requirement in requirements:
        found = installed(requirement.name)
        if found is None or not requirement.specifier.contains(found.version, prereleases=True):
            wrong.append(f"{who} asks for {requirement}, and there is {found and found.version}")
    assert not wrong


def test_each_extra_is_pinned():
    """`make venv` and `make slow` give everybody the versions that tests ran with."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    lines = [
        *project["dependencies"],
        *(line for extra in project["optional-dependencies"].values() for line in extra),
    ]
    names = {canonicalize_name(Requirement(line).name) for line in lines}
    assert names - PINS.keys() == {"gated-llama"}
