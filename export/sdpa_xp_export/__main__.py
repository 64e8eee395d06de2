"""`python -m sdpa_xp_export` is the command `sdpa-xp`."""

from sdpa_xp_export.cli import main

main()
