"""`python -m meshtrain.cli`: the same as `meshtrain`, where the script is not on the path."""

from meshtrain.cli import main

main()
