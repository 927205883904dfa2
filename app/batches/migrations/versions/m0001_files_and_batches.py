"""Files, batches and the journal of their lines."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0001"
down_revision = None

_NUMBER = sa.BigInteger().with_variant(sa.Integer(), "sqlite")


def upgrade() -> None:
    _files()
    _batches()
    op.create_table(
        "batch_lines",
        sa.Column("batch", _NUMBER, primary_key=True, autoincrement=False),
        sa.Column("line", _NUMBER, primary_key=True, autoincrement=False),
        sa.Column("is_ok", sa.Boolean, nullable=False),
        sa.Column("result", sa.LargeBinary, nullable=False),
    )


def downgrade() -> None:
    for name in ("batch_lines", "batches", "files"):
        op.drop_table(name)


def _files() -> None:
    op.create_table(
        "files",
        sa.Column("number", _NUMBER, primary_key=True, autoincrement=True),
        sa.Column("id", sa.Text, nullable=False, unique=True),
        *(sa.Column(name, sa.Text, nullable=False) for name in ("owner", "purpose", "filename")),
        *(sa.Column(name, sa.BigInteger, nullable=False) for name in ("bytes", "created_s")),
        sa.Column("expires_s", sa.BigInteger),
        sa.Column("state", sa.Text, nullable=False),
        sa.Column("touched_s", sa.Float, nullable=False),
        sqlite_autoincrement=True,
    )
    op.create_index("files_by_owner", "files", ["owner", "number"])


def _batches() -> None:
    counts = ("total", "completed", "failed", "input_tokens", "cached_tokens", "output_tokens", "reasoning_tokens")
    op.create_table(
        "batches",
        sa.Column("number", _NUMBER, primary_key=True, autoincrement=True),
        sa.Column("id", sa.Text, nullable=False, unique=True),
        *(sa.Column(name, sa.Text, nullable=False) for name in ("owner", "status", "asked", "input_file_id")),
        *(sa.Column(name, sa.BigInteger, nullable=False) for name in ("expires_s", "created_s")),
        sa.Column("times", sa.Text, nullable=False),
        sa.Column("errors", sa.Text),
        sa.Column("outcome", sa.Text, nullable=False),
        *(sa.Column(name, sa.Text) for name in ("output_file_id", "error_file_id")),
        *(sa.Column(name, sa.BigInteger, nullable=False) for name in (*counts, "scan_line", "scan_offset")),
        sa.Column("holder", sa.Text, nullable=False),
        sa.Column("epoch", sa.BigInteger, nullable=False),
        sa.Column("lease_until_s", sa.Float, nullable=False),
        sa.Column("is_swept", sa.Boolean, nullable=False),
        sqlite_autoincrement=True,
    )
    op.create_index("batches_by_owner", "batches", ["owner", "number"])
    op.create_index("batches_by_status", "batches", ["status", "lease_until_s"])
