"""Alembic's environment: it runs the migrations on the connection that it is given, in its transaction."""

from __future__ import annotations

from alembic import context

from app.batches.tables import METADATA

context.configure(connection=context.config.attributes["connection"], target_metadata=METADATA)
with context.begin_transaction():
    context.run_migrations()
