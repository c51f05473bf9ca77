"""The folder that a conversion writes: checked before the work, built beside its place, there only when complete."""

import contextlib
import errno
import secrets
import shutil
from pathlib import Path


def check_output(output: Path, source: str | Path) -> Path:
    """The absolute output folder, links resolved; ValueError unless it is free and apart from the source."""
    output = output.expanduser().absolute()
    if output.is_symlink():
        if not output.exists():
            raise ValueError(f"Output {output} is a link to {output.resolve()}, which does not exist: make it first.")
        output = output.resolve()
    if output.is_file():
        raise ValueError(f"Output {output} is a file: name a folder that does not exist yet.")
    if output.is_dir() and any(output.iterdir()):
        raise ValueError(f"Output folder {output} is not empty: name another one, or remove it first.")
    origin = Path(source).expanduser().resolve()
    if origin.exists() and (output.resolve() == origin or origin in output.resolve().parents):
        raise ValueError(f"Output {output} lies in the source {origin}, which is never changed: name another folder.")
    return output


def check_writable(output: Path, size: int) -> None:
    """OSError where `building` would raise one: told before long work instead of after it."""
    trial = building(output, size)
    trial.__enter__()
    trial.discard()


class building:
    """
    A folder beside `output` that takes its name when the block ends well and vanishes otherwise.

    Raises OSError right away when it cannot be made, or the file system has no room for `size` bytes.
    """

    def __init__(self, output: Path, size: int):
        self.output = output
        self.size = size
        self.folder = output.parent / f".{output.name}.partial-{secrets.token_hex(4)}"
        # Parents that do not exist yet, innermost first: they go again when the conversion fails.
        self.parents = [parent for parent in output.parents if not parent.exists()]

    def __enter__(self) -> Path:
        try:
            try:
                self.folder.mkdir(parents=True)
            except OSError as error:  # says where the result was to go, not what it was to be called until then
                raise OSError(error.errno, error.strerror, str(self.output)) from error
            free = shutil.disk_usage(self.folder).free
            if free < self.size:
                raise OSError(
                    errno.ENOSPC, f"{self.output.parent} has {free:,} bytes free and the result needs {self.size:,}"
                )
        except BaseException:
            self.discard()
            raise
        return self.folder

    def __exit__(self, error_type, error, traceback) -> None:
        try:
            if error_type is None:
                if self.output.exists():
                    self.output.rmdir()  # empty, see check_output
                self.folder.rename(self.output)
        finally:
            if self.folder.exists():
                self.discard()

    def discard(self) -> None:
        shutil.rmtree(self.folder, ignore_errors=True)
        for parent in self.parents:
            with contextlib.suppress(OSError):  # never made, or in use by now
                parent.rmdir()
