"""Parquet files of a run: read if they are plain files of bounded size, written for their owner only."""

import os
import secrets
from pathlib import Path
from typing import TYPE_CHECKING

from paceline.storage.plain_files import open_plain

if TYPE_CHECKING:
    import pyarrow as pa

__all__ = ["read_parquet", "write_parquet"]

_MOST_ROWS = 32 << 20
_MOST_BYTES = 4 << 30
"""Of all columns, not compressed. A file of a few kilobytes may claim any number."""


def read_parquet(path: Path) -> "pa.Table":
    """The table in a file.

    Raises:
        OSError: it cannot be read, or is not a plain file.
        ValueError: it is damaged, or larger than any run writes.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    with open(open_plain(path), "rb") as file:
        try:
            found = pq.ParquetFile(file)
            about = found.metadata
            nbytes = sum(about.row_group(i).total_byte_size for i in range(about.num_row_groups))
            if not 0 <= about.num_rows <= _MOST_ROWS or not 0 <= nbytes <= _MOST_BYTES:
                raise ValueError(
                    f"it claims {about.num_rows:,} rows of {nbytes:,} bytes; at most {_MOST_ROWS:,} rows of "
                    f"{_MOST_BYTES:,} are read"
                )
            return found.read()
        except (pa.ArrowException, OSError) as error:
            raise ValueError((str(error).splitlines() or ["it is not Parquet"])[0][:80]) from error


def write_parquet(table: "pa.Table", path: Path) -> None:
    """Replace a file by a table. Raises OSError; then what there was stays."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    temporary = path.with_name(f".{path.name}.tmp-{secrets.token_hex(4)}")
    try:
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL
        with open(os.open(temporary, flags, 0o600), "wb") as file:
            pq.write_table(table, file, compression="zstd")
        os.replace(temporary, path)
    except pa.ArrowException as error:
        raise OSError(str(error)) from error
    finally:
        temporary.unlink(missing_ok=True)
