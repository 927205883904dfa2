"""The tables. All times are seconds since 1970. A change here needs a file in `migrations/versions`."""

from __future__ import annotations

from sqlalchemy import BigInteger, Boolean, Column, Float, Index, Integer, LargeBinary, MetaData, Table, Text

METADATA = MetaData()
# SQLite numbers rows by itself only where the type is INTEGER.
_NUMBER = BigInteger().with_variant(Integer(), "sqlite")

FILES = Table(
    "files",
    METADATA,
    Column("number", _NUMBER, primary_key=True, autoincrement=True),
    Column("id", Text, nullable=False, unique=True),
    Column("owner", Text, nullable=False),
    Column("purpose", Text, nullable=False),
    Column("filename", Text, nullable=False),
    Column("bytes", BigInteger, nullable=False),
    Column("created_s", BigInteger, nullable=False),
    Column("expires_s", BigInteger),
    Column("state", Text, nullable=False),
    Column("touched_s", Float, nullable=False),
    Index("files_by_owner", "owner", "number"),
    sqlite_autoincrement=True,
)
"""`state`: `pending` while its bytes are written, `ready`, and `deleting` until its bytes are gone. Only what is ready
is shown. `touched_s`: when a pending one last grew."""

BATCHES = Table(
    "batches",
    METADATA,
    Column("number", _NUMBER, primary_key=True, autoincrement=True),
    Column("id", Text, nullable=False, unique=True),
    Column("owner", Text, nullable=False),
    Column("status", Text, nullable=False),
    Column("asked", Text, nullable=False),
    Column("input_file_id", Text, nullable=False),
    Column("expires_s", BigInteger, nullable=False),
    Column("created_s", BigInteger, nullable=False),
    Column("times", Text, nullable=False),
    Column("errors", Text),
    Column("outcome", Text, nullable=False),
    Column("output_file_id", Text),
    Column("error_file_id", Text),
    Column("total", BigInteger, nullable=False),
    Column("completed", BigInteger, nullable=False),
    Column("failed", BigInteger, nullable=False),
    Column("input_tokens", BigInteger, nullable=False),
    Column("cached_tokens", BigInteger, nullable=False),
    Column("output_tokens", BigInteger, nullable=False),
    Column("reasoning_tokens", BigInteger, nullable=False),
    Column("scan_line", BigInteger, nullable=False),
    Column("scan_offset", BigInteger, nullable=False),
    Column("holder", Text, nullable=False),
    Column("epoch", BigInteger, nullable=False),
    Column("lease_until_s", Float, nullable=False),
    Column("is_swept", Boolean, nullable=False),
    Index("batches_by_owner", "owner", "number"),
    Index("batches_by_status", "status", "lease_until_s"),
    sqlite_autoincrement=True,
)
"""`asked`, `times`, `errors`: JSON. `outcome`: the status in which it ends, "" until that is certain. `scan_line`,
`scan_offset`: all lines before are answered. `holder`, `lease_until_s`: which ingress runs it, and until when no other
may. `epoch`: how often one has taken it. `is_swept`: its lines are gone from the table below."""

LINES = Table(
    "batch_lines",
    METADATA,
    Column("batch", _NUMBER, primary_key=True, autoincrement=False),
    Column("line", _NUMBER, primary_key=True, autoincrement=False),
    Column("is_ok", Boolean, nullable=False),
    Column("result", LargeBinary, nullable=False),
)
"""The journal: a row for each answered line, with the line of the output or error file that it becomes."""
