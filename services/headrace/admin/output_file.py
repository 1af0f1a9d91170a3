"""A file that a command will write: where it cannot be, that is said before the work that fills it."""

import os
from pathlib import Path
from typing import Any

import click

PLOT_ENDINGS = (".png", ".pdf", ".svg")


class OutputFile(click.Path):
    """The path of a file that is there or can be made; becomes a Path. Nothing is opened yet."""

    def __init__(self, endings: tuple[str, ...] = (), *, is_replaced: bool = False) -> None:
        """endings: one of these it must have, since it says what is written; none: any. is_replaced: another file is
        written beside it and takes its place, so the directory must let that be also where the file is there."""
        super().__init__(dir_okay=False, writable=True, path_type=Path)
        self._endings = endings
        self._is_replaced = is_replaced

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Path:
        """Take it, or fail with what is in the way."""
        path = Path(os.fsdecode(super().convert(value, param, ctx)))
        if self._endings and path.suffix.lower() not in self._endings:
            self.fail(f"'{path}' must end in {', '.join(self._endings)}", param, ctx)
        if not path.parent.is_dir():
            self.fail(f"there is no directory '{path.parent}'", param, ctx)
        if (self._is_replaced or not path.exists()) and not os.access(path.parent, os.W_OK):
            self.fail(f"nothing can be written to the directory '{path.parent}'", param, ctx)
        return path
