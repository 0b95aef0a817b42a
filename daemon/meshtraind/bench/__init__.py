"""`meshtrain bench`: what the daemon-to-daemon collective costs, beside torch's gloo in the same run.

Nothing here is part of a daemon: `meshtraind run` imports none of it, and its links cannot do without TLS.
"""
