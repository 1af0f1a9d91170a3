"""Read a checkpoint with transformers, without its progress bars and reports in a worker's log.

This file owns the call of `from_pretrained`. Code that comes with a checkpoint is never run.
"""

from pathlib import Path
from typing import Any

from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.utils import logging


def load_weights(path: Path, **how: Any) -> PreTrainedModel:
    """The causal language model in a directory, in evaluation mode; `how` goes to `from_pretrained` as it is."""
    level, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        return AutoModelForCausalLM.from_pretrained(path, trust_remote_code=False, **how).eval()
    finally:
        logging.set_verbosity(level)
        if bars:
            logging.enable_progress_bar()
