"""What a daemon announces by multicast DNS, as packets."""

import socket

from zeroconf import ServiceInfo
from zeroconf._protocol.outgoing import DNSOutgoing
from zeroconf.const import _FLAGS_AA, _FLAGS_QR_RESPONSE

from meshtrain.doctor.multicast import SERVICE_TYPE


def announcement(device: str, name: str, version: int, port: int, address: str) -> bytes:
    """An answer with all records, made by the library that daemons announce themselves with."""
    info = ServiceInfo(
        SERVICE_TYPE,
        f"{device[:16]}.{SERVICE_TYPE}",
        addresses=[socket.inet_aton(address)],
        port=port,
        properties={"id": device, "v": str(version), "name": name, "seq": "1"},
        server=f"meshtrain-{device[:16]}.local.",
    )
    out = DNSOutgoing(_FLAGS_QR_RESPONSE | _FLAGS_AA)
    for record in (info.dns_pointer(), info.dns_service(), info.dns_text(), *info.dns_addresses()):
        out.add_answer_at_time(record, 0)
    (packet,) = out.packets()
    return packet
