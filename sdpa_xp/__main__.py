"""`python -m sdpa_xp` says where the command is: the library has none of its own."""

import sys

from ._checks import install_hint

if __name__ == "__main__":
    sys.exit(
        "sdpa_xp: this is a library; its command is `sdpa-xp`, or `python -m sdpa_xp_export`. "
        f"{install_hint('cli,export')}"
    )
