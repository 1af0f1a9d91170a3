#!/usr/bin/env python3
"""The image's health check: whether what this container was started for answers. Exit code 0 when it does.

    headrace-healthcheck [URL [CERT_FILE KEY_FILE]]

URL, or the variable HEADRACE_HEALTHCHECK, names what to ask: `http://HOST:PORT/PATH` (or https) wants a status of 200,
`grpc://HOST:PORT` a store node or a gateway that says SERVING. By default it is the node agent of a Ray node, as in the
chart's probes. An HTTPS server is asked whether it serves, not who it is, as the kubelet asks; one that wants to see a
certificate is shown that of the two files.
"""

import os
import ssl
import sys
import urllib.error
import urllib.request

DEFAULT = "http://127.0.0.1:52365/api/local_raylet_healthz"
# Below the time that the Dockerfile gives the whole check, which has an interpreter to start.
TIMEOUT_S = 4.0


def why_unhealthy(asked: str, *shown: str) -> str:
    """ "" when it answers as it should, else what is wrong. shown: files of a certificate and its key, or nothing."""
    scheme, _, rest = asked.partition("://")
    if scheme in ("http", "https"):
        return _ask_http(asked, shown)
    if scheme == "grpc" and rest:
        return _ask_grpc(rest)
    return f"HEADRACE_HEALTHCHECK must be http://, https:// or grpc://, not {asked}"


def _ask_http(url: str, shown: tuple[str, ...]) -> str:
    context = ssl.create_default_context()
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    try:
        if shown:
            context.load_cert_chain(*shown)
        with urllib.request.urlopen(url, timeout=TIMEOUT_S, context=context) as reply:
            return "" if reply.status == 200 else f"{url} answers {reply.status}"
    except (urllib.error.URLError, OSError) as error:
        return f"{url}: {error}"


def _ask_grpc(target: str) -> str:
    import grpc
    from grpc_health.v1 import health_pb2, health_pb2_grpc

    with grpc.insecure_channel(target) as channel:
        try:
            request = health_pb2.HealthCheckRequest()
            reply = health_pb2_grpc.HealthStub(channel).Check(request, timeout=TIMEOUT_S)
        except grpc.RpcError as error:
            return f"{target}: {error.code().name}"
    serving = health_pb2.HealthCheckResponse.SERVING
    return (
        ""
        if reply.status == serving
        else f"{target} says {health_pb2.HealthCheckResponse.ServingStatus.Name(reply.status)}"
    )


if __name__ == "__main__":
    wrong = why_unhealthy(*(sys.argv[1:] or [os.environ.get("HEADRACE_HEALTHCHECK", DEFAULT)]))
    print(wrong or "healthy")
    sys.exit(1 if wrong else 0)
