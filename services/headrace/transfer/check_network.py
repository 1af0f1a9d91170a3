"""Refuses, before anything listens, what would let strangers in: plain text or no keys beyond loopback.

Owns the rules of `insecure_network` and the check of the TLS files. Every process that serves asks it first. Knows no
socket: where a part listens is its settings' business.
"""

import ipaddress
from collections.abc import Sequence

from headrace.config import Config
from headrace.core.errors import ConfigInvalid
from headrace.transfer.check_certificate import check_certificate, covers, names_of
from headrace.transfer.tls_files import TlsFiles, check_pem

# A store_host that its Ray node's address takes the place of; what then holds is asked again there.
AUTO = "auto"
# What a kv_events_endpoint binds to in ZeroMQ's words when it names every interface.
_EVERY_INTERFACE = ("", "*", "0.0.0.0", "::")
LOOPBACK_NAMES = ("127.0.0.1", "localhost")


def check_network(config: Config, *, front_door: str | None = None) -> None:
    """Raises ConfigInvalid naming the setting, the reason and the remedy.

    front_door: the address on which callers are served by what starts now; None for a part that serves no callers.
    """
    check_tls(config)
    network, store = config.network, config.store
    if network.insecure_network:
        return
    if store.store_host != AUTO and not is_loopback(store.store_host) and not network.tls_ca_file:
        raise ConfigInvalid(
            "store_host",
            f"{store.store_host or 'every interface'} is beyond loopback, and there the parts talk in plain text: set "
            "tls_cert_file, tls_key_file and tls_ca_file, or store_host: 127.0.0.1; insecure_network: true allows it "
            "on a network that nobody else is on",
        )
    if front_door is not None and not is_loopback(front_door) and not config.gateway.tenants_file:
        raise ConfigInvalid(
            "http_host",
            f"{front_door or 'every interface'} is beyond loopback, and there is no tenants_file, so anybody who can "
            "connect could use the API and empty the cache: set tenants_file, or listen on 127.0.0.1; "
            "insecure_network: true allows it on a network that nobody else is on",
        )
    for key in ("kv_events_endpoint", "kv_events_replay_endpoint"):
        endpoint = getattr(store, key)
        if endpoint and not _stays_here(endpoint):
            raise ConfigInvalid(
                key,
                f"{endpoint} is beyond loopback, and KV events, which hold the token ids of prompts, have no TLS: bind "
                "them to 127.0.0.1, or allow it by insecure_network: true on a network that nobody else is on",
            )


def check_tls(config: Config) -> None:
    """The TLS settings fit together, and the files are what they should be. Raises ConfigInvalid."""
    network = config.network
    if bool(network.tls_cert_file) != bool(network.tls_key_file):
        missing = "tls_key_file" if network.tls_cert_file else "tls_cert_file"
        raise ConfigInvalid(missing, "a certificate and its key are set together, or neither")
    for key in ("tls_ca_file", "tls_client_ca_file"):
        if getattr(network, key) and not network.tls_cert_file:
            raise ConfigInvalid("tls_cert_file", f"must be set with {key}: a server shows a certificate")
    if not network.tls_cert_file:
        return
    check_pem(TlsFiles(network.tls_cert_file, network.tls_key_file, network.tls_ca_file))
    if network.tls_client_ca_file:
        check_pem(TlsFiles(ca_file=network.tls_client_ca_file, ca_setting="tls_client_ca_file"))
    names = (config.store.store_host,) if network.tls_ca_file and config.store.store_host != AUTO else ()
    check_certificate(network.tls_cert_file, network.tls_key_file, ca_file=network.tls_ca_file, names=names)


def name_to_call(config: Config, host: str) -> str:
    """How a caller on this machine names a server that listens on `host`: by a name that its certificate has.

    Raises ConfigInvalid when there is none.
    """
    candidates: Sequence[str] = LOOPBACK_NAMES if host in _EVERY_INTERFACE else (host,)
    network = config.network
    if not network.tls_cert_file:
        return candidates[0]
    named = names_of(network.tls_cert_file, network.tls_key_file)
    if host in LOOPBACK_NAMES:
        candidates = LOOPBACK_NAMES
    for name in candidates:
        if covers(named, name):
            return name
    raise ConfigInvalid(
        "tls_cert_file",
        f"{network.tls_cert_file} does not name {' or '.join(candidates)}, by which this machine calls itself; it "
        f"names: {', '.join(named) or 'none'}. Make one with that name among its subject alternative names",
    )


def check_own_calls(config: Config) -> None:
    """Whoever starts a system on one machine calls its gateway to see it ready, with the system's own certificate.

    Raises ConfigInvalid when the gateway would not let that in.
    """
    network = config.network
    if not network.tls_client_ca_file:
        return
    try:
        check_certificate(network.tls_cert_file, network.tls_key_file, ca_file=network.tls_client_ca_file)
    except ConfigInvalid as error:
        raise ConfigInvalid(
            "tls_client_ca_file",
            f"this system calls its own gateway, which would refuse it ({error.why}): put the authority of "
            f"{network.tls_cert_file} into {network.tls_client_ca_file}, beside that of callers",
        ) from error


def is_loopback(host: str) -> bool:
    """Whether only this machine can connect to what listens there."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False


def _stays_here(endpoint: str) -> bool:
    """Whether what is sent by a ZeroMQ endpoint, bound or connected (`>`), stays on this machine."""
    transport, _, address = endpoint.removeprefix(">").partition("://")
    if transport in ("ipc", "inproc"):
        return True
    return transport == "tcp" and is_loopback(address.rpartition(";")[2].rpartition(":")[0])
