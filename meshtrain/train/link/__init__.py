"""Messages on the local socket, vectors in shared memory."""
