"""`python -m meshtraind`: the same as `meshtraind`, in this very Python environment."""

import sys

from meshtraind.cli import main

sys.exit(main())
