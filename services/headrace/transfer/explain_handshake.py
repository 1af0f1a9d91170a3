"""Why TLS between two peers did not come about, in words that lead to the file that is wrong.

gRPC says it in the text of a failed call, in the words of its TLS library; nothing else tells one cause from another.
"""

# (what gRPC's text has, what it means about the other side)
_OF_THE_PEER = (
    ("certificate has expired", "its certificate has expired"),
    ("certificate is not yet valid", "its certificate is not valid yet; do the clocks agree?"),
    ("Hostname Verification Check failed", "its certificate does not name {address}"),
    ("unable to get local issuer", "its certificate is not of an authority in {ca}"),
    ("self signed certificate", "its certificate is not of an authority in {ca}"),
    ("self-signed certificate", "its certificate is not of an authority in {ca}"),
    ("CERTIFICATE_VERIFY_FAILED", "its certificate is refused"),
    ("WRONG_VERSION_NUMBER", "it does not speak TLS"),
    ("handshake failed", "the TLS handshake failed"),
)
# A server that refuses a client's certificate, or plain text, closes the connection without a word.
_CLOSED = ("Socket closed", "Connection reset")


def explain_handshake(
    details: str, *, tls: bool | None, address: str = "it", ca: str = "tls_ca_file", cert: str = ""
) -> str:
    """One sentence for a failed call's text; "" when TLS has nothing to do with it.

    tls: whether this side spoke TLS; None where that is not known. ca, cert: the files that it trusts and shows, or the
    settings that name them.
    """
    if "failed to connect" not in details:
        return ""
    if tls is not False:
        for text, meaning in _OF_THE_PEER:
            if text.lower() in details.lower():
                return meaning.format(address=address, ca=ca)
    if any(text in details for text in _CLOSED):
        if tls is None:
            return "it closes the connection; do both sides have TLS, with the same tls_ca_file?"
        if not tls:
            return "it closes connections in plain text; it may want TLS (tls_ca_file)"
        shown = f"does not accept the certificate in {cert}" if cert else "may want a certificate (tls_cert_file)"
        return f"it closes the connection; it {shown}"
    return ""
