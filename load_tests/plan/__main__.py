"""`python -m load_tests.plan`: as `baton plan`."""

import sys

from load_tests.plan.command import main

main(["plan", *sys.argv[1:]])
