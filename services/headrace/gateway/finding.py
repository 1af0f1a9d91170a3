"""One thing that `doctor` looked at."""

from dataclasses import dataclass


@dataclass(slots=True)
class Finding:
    """Good or bad; `holder` is "" for what concerns everybody. The fields of `admin.proto:Finding`."""

    check: str
    holder: str
    ok: bool
    detail: str
    fixed: str = ""
