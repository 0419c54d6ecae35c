"""Changed arguments of a script: `paceline resume RUN -- --epochs 20`.

What a script's arguments mean only the script knows, so they are compared as words: an option and the words
behind it, up to the next option, belong together. The user is told what the script gets.
"""

from collections.abc import Sequence

__all__ = ["change_arguments"]

_Parts = list[tuple[str, list[str]]]
"""Options, each with its words; words that belong to no option have the name ''."""


def change_arguments(before: Sequence[str], given: Sequence[str]) -> tuple[tuple[str, ...], list[str]]:
    """A script's arguments with some of them changed, and what is different, in words.

    An option that is given takes the place of the same option before; one that was not there comes last.
    Words without an option take the place of those before.
    """
    old, new = _parts(before), _parts(given)
    result: _Parts = []
    placed: set[str] = set()
    for name, words in old:
        if not any(name == each for each, _ in new):
            result.append((name, words))
        elif name not in placed:
            placed.add(name)
            result += [part for part in new if part[0] == name]
    missing = [part for part in new if part[0] not in placed]
    result = [*(p for p in missing if not p[0]), *result, *(p for p in missing if p[0])]
    return tuple(word for _, words in result for word in words), _differences(old, new)


def _differences(old: _Parts, new: _Parts) -> list[str]:
    found = []
    for name in dict.fromkeys(name for name, _ in new):
        now = _said(new, name)
        was = _said(old, name)
        if not was:
            found.append(f"{now} is new")
        elif now != was:
            found.append(f"{now} instead of {was}")
    return found


def _said(parts: _Parts, name: str) -> str:
    return " ".join(word for each, words in parts if each == name for word in words)


def _parts(words: Sequence[str]) -> _Parts:
    parts: _Parts = []
    for word in words:
        if _is_option(word):
            name, equals, _ = word.partition("=")
            parts.append((name, [word]))
            if equals:
                parts.append(("", []))  # what follows is not its value
        elif parts:
            parts[-1][1].append(word)
        else:
            parts.append(("", [word]))
    return [part for part in parts if part[1]]


def _is_option(word: str) -> bool:
    if not word.startswith("-") or word == "-":
        return False
    try:
        float(word)  # -0.5 is a value
    except ValueError:
        return True
    return False
