"""`python -m sdpa_xp_export` is the command `sdpa-xp`."""

from .cli import main

main()
