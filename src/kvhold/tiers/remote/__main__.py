"""``python -m kvhold.tiers.remote``: what the manager starts to speak to its store."""

import sys

from kvhold.tiers.remote.child import main

if __name__ == "__main__":
    main(sys.argv[1:])
