"""Names of files that can be written down."""

import sys

from paceline.exceptions import UsageError

__all__ = ["check_name"]


def check_name(what: str, text: str) -> None:
    """Refuse a path that cannot be written as text: in run.json, in reports, by pyarrow and safetensors.

    Python holds what it cannot read in a file's name as half characters (PEP 383).

    Args:
        what: for the message: `script`, `--run-dir`.
    """
    try:
        text.encode()
    except UnicodeEncodeError:
        shown = text.encode("utf-8", "backslashreplace").decode()
        encoding = sys.getfilesystemencoding()
        remedy = (
            "rename it"
            if encoding.lower().replace("-", "") == "utf8"
            else f"Python takes file names for {encoding} here (LC_ALL, LANG): set PYTHONUTF8=1"
        )
        raise UsageError(f"{what}={shown!r} holds bytes that are no text: {remedy}") from None
