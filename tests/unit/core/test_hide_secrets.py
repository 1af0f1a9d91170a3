"""No password of a URL is shown, however it is spelled."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.core.hide_secrets import hide_secrets

SECRET = "canary-9d1f"


@pytest.mark.parametrize(
    "url",
    [
        f"redis://headrace:{SECRET}@redis.example:6379/0",
        f"rediss://:{SECRET}@redis.example/0",
        f"redis://headrace:{SECRET}/with?odd#signs@in@it@redis.example/0",
        f"redis+sentinel://u:{SECRET}@a:1,b:2/name?sentinel_password={SECRET}&ssl_ca_certs=/ca.pem",
        f"redis://redis.example/0?password={SECRET}",
        f"http://user:{SECRET}@collector:4317",
    ],
)
def test_a_password_is_not_shown_and_the_rest_is(url):
    shown = hide_secrets(f"before {url} after")
    assert SECRET not in shown
    assert "***" in shown
    assert shown.startswith("before ")
    assert shown.endswith(" after")


@pytest.mark.parametrize("text", ["", "redis://redis.example:6379/0", "/a/path", "tcp://127.0.0.1:5557", "a: b@c"])
def test_what_holds_no_secret_is_shown_as_it_is(text):
    assert hide_secrets(text) == text


@given(st.text(max_size=30), st.text(min_size=1, max_size=30))
def test_any_password_is_hidden(user, password):
    user = "".join(c for c in user if c not in "/?#:@" and not c.isspace())
    password = f"{SECRET}{password}".replace("\n", "")
    assert SECRET not in hide_secrets(f"redis://{user}:{password}@host/0")
