"""`meshtrain demo`: several daemons on one machine, a model that trains on all of them, and one that is killed."""
