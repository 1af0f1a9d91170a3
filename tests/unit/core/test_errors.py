"""Errors cross process borders whole: type, fields and message."""

import pickle

import pytest

from headrace.core import errors

EXAMPLES = [
    errors.InvalidRequest("no", param="n"),
    errors.UnsupportedField("no tools here", param="tools"),
    errors.UnknownModel("x", ["a", "b"]),
    errors.RequestTooLarge(7),
    errors.ContextExceeded("no", tokens_max=8),
    errors.Unauthenticated("no API key"),
    errors.PermissionDenied("see it"),
    errors.Overloaded("full", retry_after_ms=20),
    errors.TenantOverShare("your share", retry_after_ms=20),
    errors.RateLimited("concurrent_max", "2 are under way", retry_after_ms=20),
    errors.WorkerUnavailable("w1", "died"),
    errors.DeadlineExceeded("a peer"),
    errors.ModelRefused("m", "MLA"),
    errors.ConfigInvalid("k", "bad"),
    errors.BlockMissing(b"\x01"),
    errors.BlockCorrupt(b"\x01", "checksum"),
    errors.StoreUnavailable("n1", "gone"),
    errors.StoreFull(3),
    errors.LeaseExpired("l1"),
    errors.IndexUnavailable("timeout"),
]


@pytest.mark.parametrize("error", EXAMPLES, ids=lambda e: type(e).__name__)
def test_an_error_survives_pickling_with_its_fields(error):
    """Fails for any class whose __init__ cannot be called again from what pickle keeps."""
    copy = pickle.loads(pickle.dumps(error))
    assert type(copy) is type(error)
    assert str(copy) == str(error)
    assert vars(copy) == vars(error)


def test_every_error_is_drawn_in_the_tree_and_has_an_example():
    named = {
        c.__name__ for c in vars(errors).values() if isinstance(c, type) and issubclass(c, errors.HeadraceError)
    } - {"HeadraceError", "CacheFault"}
    assert all(name in (errors.__doc__ or "") for name in named)
    assert {type(e).__name__ for e in EXAMPLES} == named
