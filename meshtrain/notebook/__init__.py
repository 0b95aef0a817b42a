"""Functions of a notebook, run on the paired devices in step."""
