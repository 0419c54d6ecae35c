"""A job file, `paceline run job.yaml`: all options of the command, the script and its arguments.

It becomes words of the command line, so that a setting means there what it means when it is typed.
"""

import errno
import shlex
import stat
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Any

import typer
import yaml
from typer.core import TyperCommand

from paceline.exceptions import UsageError

__all__ = ["JobFile", "Setting", "TakesJobFile", "is_job_file"]

_ENDINGS = (".yaml", ".yml")
_MOST_BYTES = 256 << 10
_TRUE = ("true", "yes", "on")
_FALSE = ("false", "no", "off")
_PROGRAM = ("script", "args")
"""Keys that are no option."""


@dataclass(frozen=True, kw_only=True)
class Setting:
    """One option of the command."""

    name: str
    """Of the parameter."""
    options: tuple[str, ...]
    """`--spans`, as typed."""
    negations: tuple[str, ...] = ()
    """`--no-spans`, if there is that."""
    flag: bool = False
    many: bool = False
    """Whether it can be repeated."""

    @property
    def keys(self) -> tuple[str, ...]:
        """What it may be called in a file, the usual name first."""
        return (*(option.removeprefix("--").replace("-", "_") for option in self.options), self.name)


def is_job_file(script: object) -> bool:
    """Whether what stands where the script goes is a job file."""
    return isinstance(script, str) and script.endswith(_ENDINGS)


class TakesJobFile(TyperCommand):
    """A command whose script may be a job file. What is typed counts more than what the file says."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Read the words; if they name a job file, those of the file before them."""
        words = list(args)
        left = super().parse_args(ctx, args)
        script, own = ctx.params.get("script"), list(ctx.params.get("args") or ())
        if ctx.resilient_parsing or not is_job_file(script):
            return left
        typed = words[: len(words) - len(own) - 1]
        if typed[-1:] == ["--"]:
            typed.pop()
        settings = [
            Setting(
                name=param.name,
                options=tuple(option for option in param.opts if option.startswith("--")),
                negations=tuple(param.secondary_opts),
                flag=getattr(param, "is_flag", False),
                many=param.multiple,
            )
            for param in self.params
            if param.param_type_name == "option" and param.name != "help"
        ]
        file = JobFile.read(Path(script))
        given = {each.name for each in settings if _typed(ctx, each.name)}
        module = ctx.params.get("module") is True
        return super().parse_args(
            ctx, [*file.words(settings, without=given), *typed, "--", file.script(module), *file.args, *own]
        )


class JobFile:
    """What a job file says, as text.

    Raises:
        UsageError: it cannot be read, or says what no option means; with the file, the key and what to do.
    """

    def __init__(self, path: Path, content: Mapping[str, Any]) -> None:
        self._path = path
        self._content = content
        self.args = self._args(content.get("args", ()))
        """The script's own."""

    @classmethod
    def read(cls, path: Path) -> "JobFile":
        """Read the file. Values stay as they are written: 1e-4 is not made a number, `no` not a False."""
        try:
            text = _read(path)
        except (OSError, UnicodeError) as error:
            reason = getattr(error, "strerror", None) or error
            raise UsageError(f"the job file {path} cannot be read: {reason}") from error
        try:
            loader = yaml.BaseLoader(text)
        except yaml.YAMLError as error:
            raise cls._not_yaml(path, error) from error
        try:
            node = loader.get_single_node()
            if node is not None and isinstance(node, yaml.MappingNode):
                # Not str() of any other key: aliases in aliases make it endless.
                if not all(isinstance(key, yaml.ScalarNode) for key, _ in node.value):
                    raise UsageError(
                        f"{path}: a key is a list or a mapping; it must be the name of a setting"
                    )
                keys = Counter(str(key.value) for key, _ in node.value)
                if twice := [key for key, number in keys.items() if number > 1]:
                    raise UsageError(f"{path}: {twice[0]!r} is there twice")
            content = loader.construct_document(node) if node is not None else {}
        except yaml.YAMLError as error:
            raise cls._not_yaml(path, error) from error
        except RecursionError:
            raise UsageError(f"the job file {path} is nested too deep, or holds itself") from None
        finally:
            loader.dispose()
        if not isinstance(content, dict):
            raise UsageError(f"{path}: a job file has lines such as `script: train.py` and `workers: 4`")
        return cls(path, content)

    @staticmethod
    def _not_yaml(path: Path, error: yaml.YAMLError) -> UsageError:
        return UsageError(f"the job file {path} is not YAML: {' '.join(str(error).split())[:300]}")

    def script(self, module: bool = False) -> str:
        """What to run: a path is one from the job file's directory; a module's name stays as it is."""
        script = self._content.get("script")
        if not isinstance(script, str) or not script:
            raise UsageError(f"{self._path} names no script; add a line `script: train.py`")
        if is_job_file(script):
            raise UsageError(f"{self._path} names {script} as its script: a job file cannot name another one")
        if module or _meant(self._content.get("module")) is True:
            return script
        return str(self._path.parent / script)

    def words(self, settings: Iterable[Setting], *, without: Iterable[str] = ()) -> list[str]:
        """The options as they would be typed.

        Args:
            without: names of parameters that the command line has: they are left out.
        """
        by_key = {key: each for each in settings for key in each.keys}
        left_out = set(without)
        words: list[str] = []
        for key, value in self._content.items():
            if key in _PROGRAM:
                continue
            setting = by_key.get(key.replace("-", "_"))
            if setting is None:
                raise self._unknown(key, list(dict.fromkeys(each.keys[0] for each in by_key.values())))
            if setting.name not in left_out:
                words += self._typed(setting, key, value)
        return words

    def _typed(self, setting: Setting, key: str, value: Any) -> list[str]:
        if setting.flag:
            meant = _meant(value)
            if meant is None:
                shown = repr(value) if isinstance(value, str) else _kind(value)
                raise UsageError(f"{self._path}: {key}: {shown} is neither true nor false")
            return [setting.options[0]] if meant else list(setting.negations[:1])
        values = value if isinstance(value, list) and setting.many else [value]
        for each in values:
            if not isinstance(each, str) or not each:
                what = "has no value" if not each else f"cannot be {_kind(each)}"
                raise UsageError(f"{self._path}: {key} {what}; leave it out for the default")
        return [f"{setting.options[0]}={each}" for each in values]

    def _unknown(self, key: str, known: Sequence[str]) -> UsageError:
        close = get_close_matches(key.replace("-", "_"), [*_PROGRAM, *known], n=1)
        hint = f"Did you mean {close[0]!r}?" if close else f"Known: {', '.join([*_PROGRAM, *known])}"
        return UsageError(f"{self._path}: there is no setting {key!r}. {hint}")

    def _args(self, value: Any) -> list[str]:
        if isinstance(value, str):
            try:
                return shlex.split(value)
            except ValueError as error:
                raise UsageError(f"{self._path}: args: {error} in {value!r}") from None
        if isinstance(value, list | tuple) and all(isinstance(each, str) for each in value):
            return list(value)
        raise UsageError(
            f"{self._path}: args is a line, `args: --lr 0.1`, or a list of words, `args: [--lr, 0.1]`"
        )


def _read(path: Path) -> str:
    """The text of a job file: a link to one will do, a pipe or a file without an end will not."""
    found = path.stat()
    if not stat.S_ISREG(found.st_mode):
        raise OSError(errno.EINVAL, "it is not a plain file", str(path))
    if found.st_size > _MOST_BYTES:
        raise OSError(errno.EFBIG, f"it has more than {_MOST_BYTES:,} bytes", str(path))
    with path.open("rb") as file:
        return file.read(_MOST_BYTES).decode()


def _meant(value: Any) -> bool | None:
    word = value.lower() if isinstance(value, str) else value
    return True if word in _TRUE else False if word in _FALSE else None


def _kind(value: Any) -> str:
    return "a list" if isinstance(value, list) else "a mapping"


def _typed(ctx: typer.Context, name: str) -> bool:
    source = ctx.get_parameter_source(name)
    return source is not None and source.name == "COMMANDLINE"
