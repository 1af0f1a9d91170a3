"""The hook after an uninstall: its own command, run against a Redis that is there and one that is gone."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import redis
from rendered_chart import EVERYTHING, EXTERNAL_REDIS, merged, ray_pods, render

from headrace.index.embedded_valkey import EmbeddedValkey


def job(**clean_up: Any) -> dict[str, Any]:
    manifests = render(merged(EVERYTHING, EXTERNAL_REDIS, {"redis": {"cleanUp": clean_up}}))
    (found,) = (m for m in manifests if m["kind"] == "Job")
    return found


def run_hook(hook: dict[str, Any], url: str) -> "subprocess.CompletedProcess[str]":
    """The container's command as it stands, with this Python in place of the image's."""
    (container,) = hook["spec"]["template"]["spec"]["containers"]
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    return subprocess.run(
        container["command"],
        env={"PATH": path, "HEADRACE_REDIS_URL": url},
        capture_output=True,
        text=True,
        timeout=150,  # far beyond the command's own deadline, on a machine that is busy with other tests
    )


def test_it_removes_headraces_keys_and_no_others():
    with EmbeddedValkey() as server:
        url = server.url
        client = redis.Redis.from_url(url)
        client.mset({"hr1:{members}:ids": "1", "hr1:{0}:n": "2", "session:1": "3"})
        done = run_hook(job(deadlineSeconds=120), url)
        assert (done.returncode, done.stdout) == (0, "removed 2 keys\n"), done.stderr
        assert client.keys() == [b"session:1"]


def test_with_redis_gone_it_ends_by_its_deadline_as_done_and_says_what_stays():
    """Fails when it waits longer than the Job may last, or fails and so holds up what waits for it."""
    done = run_hook(job(deadlineSeconds=1), "redis://127.0.0.1:1/0")
    assert done.returncode == 0
    assert "keys stay in Redis: given up after 1 s" in done.stderr


def test_it_runs_after_the_release_is_gone_and_is_never_tried_again():
    """What a release has (service account, policies) is not there any more; its secrets are the user's."""
    hook = job()
    assert hook["metadata"]["annotations"]["helm.sh/hook"] == "post-delete"
    # A Job's template cannot be changed: the one of an earlier uninstall goes first.
    assert "before-hook-creation" in hook["metadata"]["annotations"]["helm.sh/hook-delete-policy"]
    assert hook["spec"]["backoffLimit"] == 0
    deadline = float(
        hook["spec"]["template"]["spec"]["containers"][0]["command"][-1].split("--deadline-s ")[1].split()[0]
    )
    assert hook["spec"]["activeDeadlineSeconds"] >= deadline + 30  # the command ends by itself, and says why
    pod = hook["spec"]["template"]["spec"]
    assert "serviceAccountName" not in pod
    assert pod["automountServiceAccountToken"] is False
    gateway = ray_pods(render(merged(EVERYTHING, EXTERNAL_REDIS)))["gateway"]["spec"]
    assert pod["securityContext"] == gateway["securityContext"]
    for key in ("image", "securityContext"):
        assert pod["containers"][0][key] == gateway["containers"][0][key]
    url = {"HEADRACE_REDIS_URL", "HEADRACE_REDIS_PASSWORD"}
    shared = [v for v in gateway["containers"][0]["env"] if v["name"] in url]
    assert pod["containers"][0]["env"] == shared


@pytest.mark.parametrize("values", [{}, merged(EXTERNAL_REDIS, {"redis": {"cleanUp": {"enabled": False}}})])
def test_a_bundled_redis_goes_with_the_release_and_an_external_one_is_left_alone_when_asked(values):
    assert "Job" not in {m["kind"] for m in render(values)}


def test_it_and_the_bundled_redis_run_where_the_head_may():
    """Fails when a pod that any node would do for is kept from the nodes, or the registry, that the head has."""
    head = {"nodeSelector": {"pool": "small"}, "tolerations": [{"key": "pool", "operator": "Exists"}]}
    found = {
        manifest["kind"]: manifest["spec"]["template"]["spec"]
        for values in ({}, EXTERNAL_REDIS)
        for manifest in render(merged(EVERYTHING, values, {"head": head}))
        if manifest["kind"] in ("Job", "StatefulSet")
    }
    assert found.keys() == {"Job", "StatefulSet"}
    for pod in found.values():
        assert {key: pod[key] for key in head} == head
        assert pod["imagePullSecrets"] == [{"name": "registry"}]
