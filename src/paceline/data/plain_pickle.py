"""Reads pickles of plain values without unpickling them: no code in the file is ever looked up or called.

Some data sets, CIFAR-10 among them, are distributed as pickles. `pickletools` parses their instructions, and
a small machine here follows those that make dicts, lists, tuples, numbers and text. A numpy array becomes
its bytes. An instruction that would import or call anything else is refused.
"""

import pickletools
from pathlib import Path
from typing import Any

from paceline.exceptions import DataError

__all__ = ["read_plain_pickle"]

_ARRAY_PARTS = {
    f"{module} {name}"
    for module in ("numpy.core.multiarray", "numpy._core.multiarray", "numpy")
    for name in ("_reconstruct", "ndarray", "dtype")
}
_MARK = object()


class _Made:
    """Stands for what a call in the pickle would have made: an array or its dtype."""

    content: Any = None


def read_plain_pickle(file: Path) -> Any:
    """What the pickle `file` holds: dicts, lists, tuples, numbers, text, bytes.

    An array that is a value of the outermost dict is given as its bytes.

    Text that Python 2 wrote is decoded as Latin-1, as `pickle.load(…, encoding="latin1")` would.

    Raises:
        DataError: not a pickle, incomplete, or it holds something else; the message says at which byte.
    """
    content = file.read_bytes()
    machine = _PlainMachine()
    where: int | None = 0
    try:
        for instruction, argument, position in pickletools.genops(content):
            where = position
            machine.follow(instruction.name, argument)
        return machine.result()
    except (ValueError, IndexError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise DataError(
            f"{file} is not a complete pickle of plain values (at byte {where}: {error}). Download it again."
        ) from error


class _PlainMachine:
    """The part of pickle's stack machine that makes plain values."""

    def __init__(self) -> None:
        self.stack: list[Any] = []
        self.memo: dict[int, Any] = {}

    def follow(self, name: str, argument: Any) -> None:
        """Execute one instruction."""
        stack = self.stack
        match name:
            case "PROTO" | "FRAME" | "STOP":
                pass
            case "MARK":
                stack.append(_MARK)
            case "NONE" | "NEWTRUE" | "NEWFALSE":
                stack.append({"NONE": None, "NEWTRUE": True, "NEWFALSE": False}[name])
            case "EMPTY_DICT" | "EMPTY_LIST" | "EMPTY_TUPLE":
                stack.append({"EMPTY_DICT": dict, "EMPTY_LIST": list, "EMPTY_TUPLE": tuple}[name]())
            case "APPEND":
                value = stack.pop()
                self._top(list).append(value)
            case "APPENDS":
                values = self._to_mark()
                self._top(list).extend(values)
            case "SETITEM":
                value, key = stack.pop(), stack.pop()
                self._top(dict)[key] = value
            case "SETITEMS":
                values = self._to_mark()
                self._top(dict).update(zip(values[::2], values[1::2], strict=True))
            case "TUPLE":
                stack.append(tuple(self._to_mark()))
            case "LIST":
                stack.append(self._to_mark())
            case "DICT":
                values = self._to_mark()
                stack.append(dict(zip(values[::2], values[1::2], strict=True)))
            case "TUPLE1" | "TUPLE2" | "TUPLE3":
                count = int(name[-1])
                stack[-count:] = [tuple(stack[-count:])]
            case "PUT" | "BINPUT" | "LONG_BINPUT":
                self.memo[argument] = stack[-1]
            case "MEMOIZE":
                self.memo[len(self.memo)] = stack[-1]
            case "GET" | "BINGET" | "LONG_BINGET":
                stack.append(self.memo[argument])
            case "GLOBAL":
                self._part_of_array(argument)
            case "STACK_GLOBAL":
                attribute, module = stack.pop(), stack.pop()
                self._part_of_array(f"{module} {attribute}")
            case "REDUCE":
                stack.pop()  # the arguments
                if not isinstance(stack.pop(), _Made):
                    raise ValueError("calls something that is not an array")
                stack.append(_Made())
            case "BUILD":
                *_, last = stack.pop()
                self._top(_Made).content = last.encode("latin1") if isinstance(last, str) else last
            case _ if argument is not None and isinstance(argument, int | float | str | bytes):
                stack.append(argument)
            case _:
                raise ValueError(f"instruction {name}, which plain values do not need")

    def result(self) -> Any:
        """What the pickle holds, after its last instruction."""
        found = self.stack.pop()
        if self.stack:
            raise ValueError("more than one value")
        if isinstance(found, dict):
            return {key: item.content if isinstance(item, _Made) else item for key, item in found.items()}
        return found

    def _top(self, kind: type[Any]) -> Any:
        if not isinstance(self.stack[-1], kind):
            raise ValueError(f"expected a {kind.__name__}")
        return self.stack[-1]

    def _to_mark(self) -> list[Any]:
        """Everything above the last mark, which goes too."""
        for place in range(len(self.stack) - 1, -1, -1):
            if self.stack[place] is _MARK:
                values = self.stack[place + 1 :]
                del self.stack[place:]
                return values
        raise ValueError("no mark")

    def _part_of_array(self, name: str) -> None:
        if name not in _ARRAY_PARTS:
            raise ValueError(f"wants to import {name.replace(' ', '.')}, which is not part of an array")
        self.stack.append(_Made())
