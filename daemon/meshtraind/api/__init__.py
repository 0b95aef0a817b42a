"""The local socket for the command line and learners, and what paired devices may ask."""
