"""What a package promises in `__all__` is what can be imported from it, no less and no more."""

import importlib
import re
from pathlib import Path
from types import ModuleType

import pytest

from paceline.exceptions import PlanError

SOURCE = Path(__file__).parents[2] / "src" / "paceline"

PACKAGES = sorted(
    ".".join(("paceline", *file.parent.relative_to(SOURCE).parts)) for file in SOURCE.rglob("__init__.py")
)
MODULES = sorted(f"paceline.{file.stem}" for file in SOURCE.glob("*.py") if not file.stem.startswith("_"))


def order(name: str) -> tuple[int, list[tuple[int, str]]]:
    """The order of ruff's RUF022: constants, classes, the rest; numbers by value in each."""
    kind = 0 if name.isupper() and len(name) > 1 else 1 if name[0].isupper() else 2
    parts = re.findall(r"\d+|\D+", name)
    return kind, [(int(part), "") if part.isdigit() else (-1, part) for part in parts]


def undeclared(module: ModuleType) -> set[str]:
    """Public names of ours in the module that `__all__` leaves out; submodules do not count."""
    return {
        name
        for name, value in vars(module).items()
        if not name.startswith("_")
        and not isinstance(value, ModuleType)
        and str(getattr(value, "__module__", "paceline")).startswith("paceline")
    } - set(module.__all__)


def can_be_had(module: ModuleType, name: str) -> bool:
    """A name of a library that is not installed counts if its error says how to install it."""
    try:
        return hasattr(module, name)
    except PlanError as error:
        return re.search(r"pip install 'paceline\[\w+\]'", str(error)) is not None


@pytest.mark.parametrize("name", [*PACKAGES, *MODULES])
def test_exported_names(name: str) -> None:
    module = importlib.import_module(name)
    assert "__all__" in vars(module), f"{name} has no __all__: list what it offers"
    promised = list(module.__all__)
    assert len(promised) == len(set(promised)), f"{name}.__all__ names something twice"
    assert promised == sorted(promised, key=order), f"{name}.__all__ is not sorted (ruff --fix)"
    missing = [each for each in promised if not can_be_had(module, each)]
    assert not missing, f"{name}.__all__ promises {missing}, which cannot be imported"
    extra = sorted(undeclared(module))
    assert not extra, f"{name} offers {extra} without naming them in __all__"


@pytest.mark.parametrize("name", PACKAGES)
def test_package_docstring_is_a_map(name: str) -> None:
    module = importlib.import_module(name)
    assert (module.__doc__ or "").strip(), f"{name} has no docstring: it is the map of its files"


def test_undeclared_names_are_seen() -> None:
    module = ModuleType("paceline.sample")
    exec("__all__ = ['a']\na = 1\nLIMIT = 2\ndef helper(): ...\n_private = 3", vars(module))
    vars(module)["helper"].__module__ = "paceline.sample"
    vars(module)["re"] = re
    vars(module)["compile"] = re.compile
    assert undeclared(module) == {"LIMIT", "helper"}


@pytest.mark.parametrize("text", ["pip install 'paceline[lightning]'", "it is missing"])
def test_a_missing_library_is_named_with_the_command_that_installs_it(text: str) -> None:
    def lookup(name: str) -> object:
        raise PlanError(text)

    module = ModuleType("paceline.sample")
    vars(module)["__getattr__"] = lookup
    assert can_be_had(module, "Strategy") is text.startswith("pip install")


def test_no_name_of_the_api_is_a_module() -> None:
    """Once such a module is loaded it hides the function of its name, which is loaded when it is used."""
    import paceline.api

    folder = Path(paceline.api.__file__).parent
    assert not [name for name in paceline.api.__all__ if (folder / f"{name}.py").exists()]
