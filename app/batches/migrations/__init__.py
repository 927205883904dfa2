"""How the tables came to be. Alembic runs what is here; `app.batches.database.migrate` calls it."""
