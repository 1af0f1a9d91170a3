"""With certificates for the parts, their metrics are HTTPS: whoever asks for them in the cluster does so, too."""

from rendered_chart import EVERYTHING, one, ray_pods, render


def test_the_monitors_read_by_https_and_trust_the_authority_of_the_pods():
    """Fails when Prometheus asks in plain text and finds no target up."""
    manifests = render(EVERYTHING)
    authority = EVERYTHING["tls"]["authoritySecret"]["name"]
    endpoints = one(manifests, "PodMonitor")["spec"]["podMetricsEndpoints"]
    gateways = one(manifests, "ServiceMonitor")["spec"]["endpoints"]
    assert endpoints
    own, of_ray = gateways
    assert own["targetPort"] == "metrics-1"
    # Ray's own metrics know no TLS; of them only what Headrace's proxies say is kept.
    assert of_ray["targetPort"] == "metrics"
    assert "scheme" not in of_ray
    assert [relabeling["regex"] for relabeling in of_ray["metricRelabelings"]] == ["ray_headrace_.*"]
    for endpoint in [*endpoints, own]:
        assert endpoint["scheme"] == "https"
        assert endpoint["tlsConfig"]["ca"]["secret"]["name"] == authority
        assert "cert" not in endpoint["tlsConfig"]
    probed = [pod["spec"]["containers"][0]["readinessProbe"].get("httpGet", {}) for pod in ray_pods(manifests).values()]
    assert {probe["scheme"] for probe in probed if probe.get("path") == "/metrics"} == {"HTTPS"}


def test_without_certificates_the_pod_monitor_reads_plain_text():
    manifests = render(
        {"monitoring": {"podMonitor": {"enabled": True}}, "networkPolicies": {"prometheus": [{"podSelector": {}}]}}
    )
    for endpoint in one(manifests, "PodMonitor")["spec"]["podMetricsEndpoints"]:
        assert endpoint.keys() == {"port", "path", "interval"}
    probed = [pod["spec"]["containers"][0]["readinessProbe"].get("httpGet", {}) for pod in ray_pods(manifests).values()]
    assert all("scheme" not in probe for probe in probed)
