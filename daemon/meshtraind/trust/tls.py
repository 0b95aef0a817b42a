"""TLS between paired devices: version 1.3 only, both sides authenticated, trust is exactly the table of pins.

Two locks, because each has a gap. The handshake refuses certificates that are not in the trust store, but a connection
that is open, or half-way through its handshake, outlives the store it began with. `verify_peer` compares the hash of
what the peer showed with the pins of this moment, and that is what revokes. A client that the server refuses sees its
connection succeed and then end (TLS 1.3): nothing is linked before the peer's hello.

While this device shows a pairing code, and only then, a guest may come in without a certificate, by naming
PAIRING_ALPN (RFC 7301). OpenSSL asks for the certificate before it tells which protocol was chosen, so meanwhile the
first lock lets everybody pass who shows none at all, and `greeting.Doorway` lets the second decide, before a byte is
read: whoever has not named PAIRING_ALPN shows a pinned certificate or is sent away.
"""

import ssl
from collections.abc import Mapping

from meshtraind.trust.identity import Identity, device_id_of
from meshtraind.trust.pins import PinTable

PAIRING_ALPN = "meshtrain-pair"


class NotPinnedError(Exception):
    """The other end is not a device that this one is paired with."""


class Trust:
    """The TLS contexts of one device, rebuilt whenever a device is pinned or unpinned.

    Args:
        identity: what this device shows.
        pins: whom it trusts.

    Attributes:
        server_context: for listeners. One object for good: every handshake that it begins uses the pins of that moment.
    """

    def __init__(self, identity: Identity, pins: PinTable) -> None:
        self._identity = identity
        self._pins = pins
        self._guests_admitted = False
        self.server_context = self._context(ssl.PROTOCOL_TLS_SERVER)
        self.server_context.sni_callback = self._use_current_pins
        self._rebuild()
        pins.subscribe(self._rebuild)

    @property
    def client_context(self) -> ssl.SSLContext:
        """The TLS context for one dial; take it anew for every dial."""
        return self._client

    def admit_guests(self, admitted: bool) -> None:
        """Whether callers may name PAIRING_ALPN, without a certificate: only while a code is shown."""
        self._guests_admitted = admitted
        self.server_context.verify_mode = ssl.CERT_OPTIONAL if admitted else ssl.CERT_REQUIRED
        self._rebuild()

    def verify_peer(self, ssl_object: ssl.SSLObject | ssl.SSLSocket) -> str:
        """The device id of the other end of a finished handshake.

        Raises:
            NotPinnedError: it showed no certificate, or that of a device that is not pinned (any more).
        """
        certificate_der = ssl_object.getpeercert(binary_form=True)
        if certificate_der is None:
            raise NotPinnedError("the other end showed no certificate")
        device_id = device_id_of(certificate_der)
        if device_id not in self._pinned:
            raise NotPinnedError(f"device {device_id[:8]} is not paired with this one: run `meshtrain pair` on both")
        return device_id

    @property
    def names(self) -> Mapping[str, str]:
        """What the pinned devices called themselves, by id."""
        return self._pinned

    def name_of(self, device_id: str) -> str:
        """What a pinned device called itself when it was pinned."""
        return self._pinned[device_id]

    def _rebuild(self) -> None:
        pins = self._pins.all()
        server, client = self._context(ssl.PROTOCOL_TLS_SERVER), self._context(ssl.PROTOCOL_TLS_CLIENT)
        for pin in pins:
            server.load_verify_locations(cadata=pin.certificate_pem)
            client.load_verify_locations(cadata=pin.certificate_pem)
        if self._guests_admitted:
            server.set_alpn_protocols([PAIRING_ALPN])
        self._server, self._client = server, client
        self._pinned = {pin.device_id: pin.name for pin in pins}

    def _use_current_pins(
        self, ssl_object: ssl.SSLObject | ssl.SSLSocket, _name: str | None, _context: ssl.SSLContext
    ) -> None:
        # OpenSSL calls this for every client hello, with or without a server name. From here on the pins and the ALPN
        # are those of `_server`; whether a certificate is required stays as it was in `server_context`.
        ssl_object.context = self._server

    def _context(self, protocol: int) -> ssl.SSLContext:
        context = ssl.SSLContext(protocol)
        context.minimum_version = ssl.TLSVersion.TLSv1_3
        context.check_hostname = False  # identity is the key, never the address
        context.verify_mode = ssl.CERT_REQUIRED
        if protocol == ssl.PROTOCOL_TLS_SERVER:
            context.num_tickets = 0  # a resumed session would not show its certificate to the present trust store
        self._identity.load_into(context)
        return context
