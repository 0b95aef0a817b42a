"""The meshtrain daemon: the only place with sockets and event loops."""
