"""`python -m app.cli`: as `baton`."""

from app.cli.main import main

main()
