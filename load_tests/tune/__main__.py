"""`python -m load_tests.tune`."""

from load_tests.tune.tune import main

main()
