"""Settings of KV events that cannot work are refused by name, before anything starts."""

import pytest

from headrace.config import load_config
from headrace.core.errors import ConfigInvalid


def test_no_events_are_sent_unless_an_endpoint_is_named():
    assert load_config(environ={}).store.kv_events_endpoint == ""


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("kv_events_layout", "object"),
        ("kv_events_hashes", "hex"),
        ("kv_events_replay_endpoint", "tcp://127.0.0.1:5558"),  # of events that nobody sends
    ],
)
def test_a_setting_that_cannot_work_is_refused_by_name(key: str, value: str):
    with pytest.raises(ConfigInvalid, match=key):
        load_config({key: value}, environ={})
