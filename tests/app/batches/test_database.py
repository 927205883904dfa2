"""The database: its tables, its transactions, and what is said where it does not answer."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path

import pytest
from alembic.autogenerate import compare_metadata
from alembic.migration import MigrationContext
from sqlalchemy import Connection, func, select, text

from app.batches.database import Database, begun, engine_of, migrate
from app.batches.stores import Stores
from app.batches.tables import BATCHES, FILES, LINES, METADATA
from deployments.errors import StoreAway


def test_the_migrations_make_the_tables_that_the_code_knows(no_leaks: None, tmp_path: Path) -> None:
    engine = engine_of(f"sqlite:///{tmp_path / 'new' / 'batches.db'}")
    migrate(engine)
    migrate(engine)
    with begun(engine, writes=False) as connection:
        assert compare_metadata(MigrationContext.configure(connection), METADATA) == []
    engine.dispose()


def test_ingresses_that_start_together_make_the_tables_once(no_leaks: None, tmp_path: Path) -> None:
    url, failed = f"sqlite:///{tmp_path / 'batches.db'}", list[Exception]()

    def start() -> None:
        engine = engine_of(url)
        try:
            migrate(engine)
        except Exception as error:  # noqa: BLE001 - the test's thread tells it to the test
            failed.append(error)
        engine.dispose()

    threads = [threading.Thread(target=start) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive()
    assert failed == []


async def test_a_transaction_that_fails_changes_nothing(stores: Stores) -> None:
    def fails(connection: Connection) -> None:
        connection.execute(LINES.insert().values(batch=1, line=1, is_ok=True, result=b""))
        raise KeyError

    with pytest.raises(KeyError):
        await stores.database.write(fails)
    assert await stores.database.read(lambda c: c.scalar(select(func.count()).select_from(LINES))) == 0


async def test_writers_of_several_ingresses_wait_for_each_other(no_leaks: None, tmp_path: Path) -> None:
    databases = [Database(f"sqlite:///{tmp_path / 'batches.db'}") for _ in range(3)]
    for database in databases:
        await database.migrate()

    def add(connection: Connection) -> None:
        last = connection.scalar(select(func.max(LINES.c.line))) or 0
        connection.execute(LINES.insert().values(batch=1, line=last + 1, is_ok=True, result=b""))

    await asyncio.gather(*(database.write(add) for database in databases for _ in range(20)))
    assert await databases[0].read(lambda c: c.scalar(select(func.max(LINES.c.line)))) == 60
    for database in databases:
        await asyncio.to_thread(database.close)


async def test_a_database_that_cannot_be_reached_is_away(no_leaks: None, tmp_path: Path) -> None:
    database = Database(f"sqlite:///{tmp_path}")  # a folder
    with pytest.raises(StoreAway, match="database of batches does not answer"):
        await database.migrate()
    await asyncio.to_thread(database.close)


async def test_commits_are_on_disk(stores: Stores) -> None:
    """In SQLite's journal of writes, whose commits are flushed at `synchronous` 2."""
    for pragma, value in (("journal_mode", "wal"), ("synchronous", 2)):
        found = await stores.database.read(lambda c, asked=pragma: c.scalar(text(f"PRAGMA {asked}")))  # type: ignore[misc]
        assert found == value
    assert {BATCHES.name, FILES.name, LINES.name} == set(METADATA.tables)
