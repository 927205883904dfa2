"""`python -m app.launch`."""

from app.launch.launcher import main

raise SystemExit(main())
