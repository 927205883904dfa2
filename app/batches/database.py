"""The database of files and batches: SQLite, or any that SQLAlchemy reaches. What is given runs in one thread.

A process of its own is not needed: the database keeps ingresses apart. A writer of SQLite takes the lock when its
transaction begins, so none fails in the middle because another has written. Each commit is on disk when it returns.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

from alembic import command
from alembic.config import Config
from sqlalchemy import Connection, Engine, create_engine, event, make_url, text
from sqlalchemy.exc import DBAPIError, IntegrityError
from sqlalchemy.exc import TimeoutError as PoolTimeout

from deployments.errors import StoreAway

logger = logging.getLogger("baton.batches")
A = TypeVar("A")
LOCK_S = 20.0
"""How long a transaction waits for another ingress's, in seconds."""
_MIGRATIONS = Path(__file__).parent / "migrations"
_MIGRATION_LOCK = 7_102_024


class Database:
    """`url`: as SQLAlchemy names a database. Close it. Raises StoreAway from all that asks it."""

    def __init__(self, url: str) -> None:
        self._engine = engine_of(url)
        self._thread = ThreadPoolExecutor(1, "baton-batches")
        self._is_migrated = False

    async def write(self, work: Callable[[Connection], A]) -> A:
        """What `work` gives, in a transaction that is durable when this returns. It may be cancelled, and goes on."""
        return await self._run(work, True)

    async def read(self, work: Callable[[Connection], A]) -> A:
        """What `work` gives; it changes nothing."""
        return await self._run(work, False)

    async def migrate(self) -> None:
        """Bring the tables up to date; once."""
        if not self._is_migrated:
            await asyncio.get_running_loop().run_in_executor(self._thread, _or_away, lambda: migrate(self._engine))
            self._is_migrated = True

    async def _run(self, work: Callable[[Connection], A], writes: bool) -> A:
        def run() -> A:
            with begun(self._engine, writes) as connection:
                return work(connection)

        return await asyncio.get_running_loop().run_in_executor(self._thread, _or_away, run)

    def close(self) -> None:
        """Let what runs end, and close every connection. Blocks for as long."""
        self._thread.shutdown(wait=True)
        self._engine.dispose()


def engine_of(url: str) -> Engine:
    """An engine of SQLAlchemy, with what this store needs of SQLite. Its folder is made where there is none."""
    parsed = make_url(url)
    if parsed.get_backend_name() != "sqlite":
        return create_engine(parsed, pool_pre_ping=True)
    if parsed.database and parsed.database != ":memory:":
        Path(parsed.database).parent.mkdir(parents=True, exist_ok=True)
    engine = create_engine(parsed, connect_args={"timeout": LOCK_S})
    event.listen(engine, "connect", _set_up_sqlite)
    event.listen(engine, "begin", _begin_sqlite)
    return engine


@contextmanager
def begun(engine: Engine, writes: bool) -> Iterator[Connection]:
    """A transaction; it is committed at the end of the block, or undone by an exception."""
    with engine.connect().execution_options(baton_writes=writes) as connection, connection.begin():
        yield connection


def migrate(engine: Engine) -> None:
    """Bring the tables up to date. Of several processes one does it, and the others wait."""
    config = Config()
    config.set_main_option("script_location", os.fspath(_MIGRATIONS).replace("%", "%%"))
    with begun(engine, writes=True) as connection:
        if engine.dialect.name == "postgresql":
            connection.execute(text("SELECT pg_advisory_xact_lock(:lock)"), {"lock": _MIGRATION_LOCK})
        config.attributes["connection"] = connection
        command.upgrade(config, "head")


def _or_away(work: Callable[[], A]) -> A:
    """What `work` gives. Raises StoreAway where the database does not do it. What breaks its rules is our fault."""
    try:
        return work()
    except IntegrityError:
        raise
    except (DBAPIError, PoolTimeout, OSError) as error:
        logger.warning("the database of batches: %s", error)
        raise StoreAway(f"the database of batches does not answer: {type(error).__name__}") from error


def _set_up_sqlite(connection: Any, record: object) -> None:
    connection.isolation_level = None  # the transactions are begun below, and not by the driver
    for pragma in ("journal_mode = WAL", "synchronous = FULL"):
        connection.execute(f"PRAGMA {pragma}").close()


def _begin_sqlite(connection: Connection) -> None:
    writes = connection.get_execution_options().get("baton_writes", True)
    connection.exec_driver_sql("BEGIN IMMEDIATE" if writes else "BEGIN")
