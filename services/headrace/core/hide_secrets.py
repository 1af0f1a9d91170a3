"""Settings as they may be shown: a URL may carry a password, and what is printed ends in tickets and logs."""

import re

# user:password@ of a URL. Greedy, since a password with an @ in it that nobody encoded still ends at the last one.
_PASSWORD = re.compile(r"(?<=://)([^/?#\s:@]*):(.*)@")
# Options of a URL that are secrets: ...?sentinel_password=...&
_OPTION = re.compile(r"((?:\w*_)?(?:password|token|secret|key)=)[^&\s]+", re.IGNORECASE)
HIDDEN = "***"


def hide_secrets(text: str) -> str:
    """The same text with `***` for what is secret in the URLs in it. Hides too much rather than too little."""
    return _OPTION.sub(rf"\1{HIDDEN}", _PASSWORD.sub(rf"\1:{HIDDEN}@", text))
