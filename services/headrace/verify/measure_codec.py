"""What a KV codec does to a model's answers, measured: the figures behind every choice of a codec.

Each prompt is answered greedily on raw KV. Then its prefix goes through the codec, as a store would have kept it, and
the model reads the same answer after it, token by token (teacher-forced): so each position is compared on its own, and
one early difference does not count again behind it. A pool's codec is measured alike, but for one thing: all that
is computed, prefix and answer, is in the coded pool. A greedy text is the same to its end exactly if every position
agrees, since up to the first difference both runs have read the same tokens; so free-running equality needs no runs of
its own. Both sides are computed in the same steps, so that nothing but the codec differs.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from tokenizers import Tokenizer

from headrace.config import STORE_CODECS, Config
from headrace.core.block import HashAlgorithm, KvLayout
from headrace.core.errors import BlockCorrupt, InvalidRequest, ModelRefused
from headrace.engine.codec_bound import CodecBound, write_bound
from headrace.engine.load_model import LoadedModel, load_model
from headrace.engine.make_pool import with_pool
from headrace.engine.model_runner import SequenceStep
from headrace.transfer.coded_pool import stored_pool
from headrace.verify.codec_report import CodecReport
from headrace.verify.library_text import code_tokens, cut, prose_tokens

Report = Callable[[str], None]

PROMPTS = 100
PROMPT_TOKENS = 256  # of each, rounded to whole blocks, go through the codec; one more token is computed
# Perplexity: so many pieces of the text, of each of which the second half is predicted after the coded first one.
PERPLEXITY_PIECES = 16
# Prompts that are answered side by side: a batch of 8 costs hardly more than one prompt alone.
BATCH_PROMPTS = 8
# Rows of logits that are looked at together: 64 rows of 50,000 float32 are 13 MB.
LOGITS_ROWS = 64


def measure_codec(config: Config, *, codec: str, generated_tokens: int, report: Report) -> CodecReport:
    """Measure one codec and remember the outcome. Two minutes for the default model on two cores.

    codec: of a store (int8, fp8) or of a pool (int8_token, fp8_token). Raises ModelRefused (also when the codec cannot
    keep this model's KV), ConfigInvalid, InvalidRequest (a context too short).
    """
    pool_tokens = _pool_tokens(config, generated_tokens)
    settings = replace(
        config.engine,
        store_codec="raw",
        pool_codec="raw",
        pool_tokens=pool_tokens,
        batch_sequences_max=pool_tokens,  # so that each block has all layers: it is read again from its beginning
    )
    model = load_model(
        config.model,
        settings,
        trust_group=config.gateway.trust_group,
        hash_algorithm=HashAlgorithm(config.gateway.hash_algorithm),
        report=report,
    )
    layout = replace(model.kv.layout, codec=codec)
    prefix_tokens = _prefix_tokens(model, generated_tokens)
    tokenizer = Tokenizer.from_file(str(model.path / "tokenizer.json"))
    texts = code_tokens(tokenizer), prose_tokens(tokenizer)
    try:
        coded = _CodedStore(model, layout) if codec in STORE_CODECS else _CodedPool(model, layout)
        comparison = _Comparison(model, coded, prefix_tokens)
        answers = comparison.answers(_prompts(texts, prefix_tokens + 1), generated_tokens, report)
        perplexity, coded_perplexity = comparison.perplexities(texts[1], report)
    except BlockCorrupt as fault:
        raise ModelRefused(model.name, f"codec {codec} cannot keep its KV: {fault.why}") from fault
    bound = CodecBound(
        codec=codec,
        bytes_ratio=layout.block_bytes / model.kv.layout.block_bytes,
        prompts=answers.prompts,
        positions=answers.positions,
        greedy_agreement=answers.agreeing / answers.positions,
        equal_texts=answers.equal_texts / answers.prompts,
        logit_error_max=answers.error_max,
        logit_error_mean=answers.error_sum / answers.logits,
        kl_mean=answers.kl_sum / answers.positions,
        perplexity=perplexity,
        perplexity_change=coded_perplexity / perplexity - 1,
    )
    write_bound(bound, config.model, config.engine, model.path)
    return CodecReport(model.name, prefix_tokens=prefix_tokens, generated_tokens=generated_tokens, bound=bound)


def _pool_tokens(config: Config, generated_tokens: int) -> int:
    """Room for a batch, raw, and for one more coded prompt; whole blocks each."""
    block_tokens = config.engine.block_tokens
    blocks = -(-max(PROMPT_TOKENS + generated_tokens, 2 * PROMPT_TOKENS) // block_tokens) + 2
    return (BATCH_PROMPTS + 1) * blocks * block_tokens


def _prefix_tokens(model: LoadedModel, generated_tokens: int) -> int:
    """Whole blocks, at least one; as many as PROMPT_TOKENS and the context allow."""
    block_tokens = model.kv.layout.block_tokens
    room = (model.context_tokens_max - generated_tokens - 1) // block_tokens
    if room < 1 or model.context_tokens_max < 2 * block_tokens:
        raise InvalidRequest(
            f"a context of {model.context_tokens_max} has no room for a block of {block_tokens} and "
            f"{generated_tokens} new tokens; use smaller --block-tokens or --tokens"
        )
    return min(max(1, PROMPT_TOKENS // block_tokens), room) * block_tokens


def _prompts(texts: Sequence[Sequence[int]], num_tokens: int) -> list[list[int]]:
    """From each text in turn, from places far apart."""
    turns = [(texts[number % len(texts)], number // len(texts)) for number in range(PROMPTS)]
    return [cut(text, place * len(text) * len(texts) // PROMPTS, num_tokens) for text, place in turns]


@dataclass(slots=True)
class _Answers:
    """Sums over all prompts and positions."""

    prompts: int = 0
    positions: int = 0
    logits: int = 0
    agreeing: int = 0
    equal_texts: int = 0
    error_sum: float = 0.0
    error_max: float = 0.0
    kl_sum: float = 0.0
    prompt_agrees: bool = True  # of the prompt under way

    def add(self, raw: torch.Tensor, coded: torch.Tensor) -> None:
        """Some positions of one prompt: logits [positions, vocab] float32."""
        error = (raw - coded).abs()
        agrees = raw.argmax(-1) == coded.argmax(-1)
        kl = torch.nn.functional.kl_div(coded.log_softmax(-1), raw.log_softmax(-1), log_target=True, reduction="none")
        self.positions += len(raw)
        self.logits += raw.numel()
        self.agreeing += int(agrees.sum())
        self.error_sum += float(error.sum(dtype=torch.float64))
        self.error_max = max(self.error_max, float(error.max()))
        self.kl_sum += float(kl.sum(dtype=torch.float64))
        self.prompt_agrees &= bool(agrees.all())

    def end_prompt(self) -> None:
        """All positions of one prompt have been added."""
        self.prompts += 1
        self.equal_texts += self.prompt_agrees
        self.prompt_agrees = True


class _CodedStore:
    """Prefixes as they come back from a store of a lossy codec: in the last blocks of the raw pool."""

    def __init__(self, model: LoadedModel, layout: KvLayout) -> None:
        self.runner = model.runner
        self.table = _tables(model)[-1]
        self._pool = stored_pool(model.kv, layout)
        self._payload = memoryview(bytearray(layout.block_bytes))

    def take_prefix(self, tokens: Sequence[int], raw_table: Sequence[int]) -> None:
        """Have the KV of these tokens, whole blocks that are computed in `raw_table`."""
        num_blocks = len(tokens) // self.runner.kv.layout.block_tokens
        for raw_block, coded_block in zip(raw_table[:num_blocks], self.table, strict=False):
            self._pool.read_block(raw_block, self._payload)
            self._pool.write_block(coded_block, self._payload)


class _CodedPool:
    """The same model over a quantised pool of its own."""

    def __init__(self, model: LoadedModel, layout: KvLayout) -> None:
        num_blocks = len(_tables(model)[-1])
        coded = with_pool(model, num_blocks=num_blocks, codec=layout.codec)
        self.runner = coded.runner
        self.table = coded.kv.whole_blocks(num_blocks)

    def take_prefix(self, tokens: Sequence[int], raw_table: Sequence[int]) -> None:
        """Have the KV of these tokens: they are computed here."""
        self.runner.run_step([SequenceStep(tuple(tokens), 0, self.table, 0)])


def _tables(model: LoadedModel) -> list[list[int]]:
    """The pool's blocks: a table for each prompt of a batch, and one more."""
    size, blocks = model.kv.num_blocks // (BATCH_PROMPTS + 1), model.kv.whole_blocks(model.kv.num_blocks)
    return [blocks[number * size : (number + 1) * size] for number in range(BATCH_PROMPTS + 1)]


class _Comparison:
    """Runs of one model on raw and on coded KV, in the calling thread; the pool is all ours."""

    def __init__(self, model: LoadedModel, coded: _CodedStore | _CodedPool, prefix_tokens: int) -> None:
        self._model = model
        self._coded = coded
        self._prefix_tokens = prefix_tokens
        self._tables = _tables(model)[:-1]

    def answers(self, prompts: Sequence[list[int]], generated_tokens: int, report: Report) -> _Answers:
        """Answer every prompt greedily, then compare the logits behind each token of its answer."""
        found = _Answers()
        for first in range(0, len(prompts), BATCH_PROMPTS):
            batch = prompts[first : first + BATCH_PROMPTS]
            texts = self._generate(batch, generated_tokens)
            for text, table in zip(texts, self._tables, strict=False):
                for raw, coded in self._both(text[:-1], table):
                    found.add(raw, coded)
                found.end_prompt()
            agreement = found.agreeing / found.positions
            report(f"{found.prompts} of {len(prompts)} prompts: the same token at {agreement:.1%} of positions")
        return found

    def perplexities(self, text: Sequence[int], report: Report) -> tuple[float, float]:
        """Of pieces of a text, on raw and on coded KV: exp of the mean negative log-probability of a token."""
        report(f"perplexity of {PERPLEXITY_PIECES} pieces of text")
        length = min(2 * self._prefix_tokens, self._model.context_tokens_max)
        lost, count = torch.zeros(2, dtype=torch.float64), 0
        for piece in range(PERPLEXITY_PIECES):
            tokens = cut(text, piece * len(text) // PERPLEXITY_PIECES, length)
            self._compute(tokens[: self._prefix_tokens + 1], self._tables[0])
            predicted = iter(tokens[self._prefix_tokens + 1 :])
            for logits in self._both(tokens[:-1], self._tables[0]):
                wanted = torch.tensor([next(predicted) for _ in range(len(logits[0]))]).unsqueeze(1)
                lost -= torch.tensor([float(side.log_softmax(-1).gather(1, wanted).sum()) for side in logits])
                count += len(wanted)
        raw, coded = (lost / count).exp().tolist()
        return raw, coded

    def _generate(self, prompts: Sequence[list[int]], num_tokens: int) -> list[list[int]]:
        """The prompts with their greedy answers; the tables hold the KV of all but the last token."""
        texts = [list(prompt) for prompt in prompts]
        for text, table in zip(texts, self._tables, strict=False):
            text.append(int(self._compute(text, table).argmax()))
        for _ in range(num_tokens - 1):
            steps = [
                SequenceStep(token_ids=(text[-1],), start=len(text) - 1, block_ids=table, num_logits=1)
                for text, table in zip(texts, self._tables, strict=False)
            ]
            for text, token_id in zip(texts, self._model.runner.run_step(steps).argmax(-1).tolist(), strict=True):
                text.append(token_id)
        return texts

    def _compute(self, tokens: Sequence[int], table: Sequence[int]) -> torch.Tensor:
        """The KV of all tokens into the table; the last one's logits, [1, vocab]."""
        return self._model.runner.run_step([SequenceStep(tuple(tokens), 0, table, 1)])

    def _both(self, tokens: Sequence[int], table: Sequence[int]) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Logits of all tokens behind the prefix, some rows at a time: on the table's KV, and on that prefix coded."""
        self._coded.take_prefix(tokens[: self._prefix_tokens], table)
        sides = ((self._model.runner, table), (self._coded.runner, self._coded.table))
        for start in range(self._prefix_tokens, len(tokens), LOGITS_ROWS):
            rows = tuple(tokens[start : start + LOGITS_ROWS])
            raw, coded = (runner.run_step([SequenceStep(rows, start, blocks, len(rows))]) for runner, blocks in sides)
            yield raw, coded
