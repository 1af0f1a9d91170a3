"""One sequence under way: its tokens, what of them is computed, its text, and when it ends.

This file owns what happens to a sequence when rows of it were computed. It knows nothing of other sequences, of
threads or of how rows are computed. A run belongs to the step thread from the moment it is submitted.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from tokenizers import Tokenizer

from headrace.core.block import BlockHash, HashAlgorithm, HashedPrompt, hash_block, root_hash
from headrace.core.generation import FinishReason, SamplingParams, TokenDelta, TokenLogprob
from headrace.core.part_ids import PartIds
from headrace.engine.admission_queue import Admission
from headrace.engine.block_table import TableWindows
from headrace.engine.detokenize import TextStream, detokenize
from headrace.engine.drafter import Draft, DraftCheck, DraftWish
from headrace.engine.event_stream import EventStream, FilledBlock, RunFinished
from headrace.engine.model_runner import SequenceStep
from headrace.engine.pool_values import Taken
from headrace.engine.prefix_backup import PrefixBackup
from headrace.engine.sample_token import Logits, sample_token
from headrace.engine.schedule_step import PlannedRows, SequenceState


@dataclass(frozen=True, slots=True)
class ReloadTable:
    """Where blocks of a run are read back to: block i of `blocks` goes to `block_ids[i]`."""

    block_ids: tuple[int, ...]
    blocks: range
    saved_from: int  # where computing would begin without them: they save all from here on
    held: tuple[int, ...]  # all that the run has of the pool meanwhile
    passed: tuple[int, ...]  # parts that have no place meanwhile, for the caller to give back


@dataclass(frozen=True, slots=True)
class RunRules:
    """What is the same for all runs of an engine."""

    context_tokens_max: int  # prompt plus output
    eos_token_ids: frozenset[int]
    tokenizer: Tokenizer
    hash_algorithm: HashAlgorithm


class Run:
    """A sequence and how far it got. `sampling` None: only the KV of the prompt's full blocks is wanted."""

    def __init__(
        self,
        admission: Admission,
        stream: EventStream,
        rules: RunRules,
        *,
        num_computed: int,
        sampling: SamplingParams | None,
        leaves_blocks: bool,
        backup: PrefixBackup | None = None,
    ) -> None:
        self.admission = admission
        self.stream = stream
        self.key = admission.key
        self.block_ids = admission.block_ids
        self.num_computed = num_computed
        self.in_batch = False
        self.turn = 0  # place among those whose prompts are not computed yet, as it was last settled
        self.leader: int | None = None  # key of the run that computes this one's next block, as it was last settled
        self.first_computed: int | None = None  # the first position that was ever computed for this run
        self._end_computed = 0  # and the end of what was
        self.leaves_blocks = leaves_blocks
        self.is_forgotten = False  # a prefix of it is not to be found by hash any more, nor is what it computes
        self.draft = Draft()  # what might follow the newest token, to be computed with it
        self._check = DraftCheck()
        self._num_drafted = self._num_accepted = 0  # tokens of drafts that were computed, and those that were right
        self.backup = backup
        self._near_read_back = range(0)  # blocks whose near parts are being read back, or free to be written
        self.reloading = False  # blocks are being read back: others write to them, so nobody computes or preempts it
        self._sampling = sampling
        self._rules = rules
        self._hashed = admission.prompt  # grows by generated tokens, block by block
        self._token_ids = list(admission.prompt.token_ids)
        self._num_prompt = len(self._token_ids)
        self._num_reported = num_computed // self._hashed.block_tokens
        self._text = TextStream(rules.tokenizer, after=self._token_ids, stop=sampling.stop if sampling else ())

    @property
    def state(self) -> SequenceState:
        """This sequence as the scheduler sees it."""
        samples = self._sampling is not None
        return SequenceState(
            key=self.key,
            num_computed=self.num_computed,
            num_target=self.num_computed + self.num_missing,
            num_blocks=len(self.block_ids),
            first_block=self.admission.first_block,
            in_batch=self.in_batch,
            wants_logits=samples,
            turn=self.turn,
            leader=self.leader,
            num_drafts=len(self.draft.token_ids),
            end_near=self.admission.end_near,
        )

    @property
    def num_missing(self) -> int:
        """Tokens to be computed until the run's next result; 1 while it decodes."""
        samples = self._sampling is not None
        num_target = len(self._token_ids) if samples else len(self._hashed.chain) * self._hashed.block_tokens
        return num_target - self.num_computed

    @property
    def decodes(self) -> bool:
        """Whether it is in the batch and lacks no more than its newest token."""
        return self.in_batch and self._sampling is not None and self.num_missing == 1

    def draft_wish(self, most: int) -> DraftWish | None:
        """What a draft behind its newest token may be, of at most `most` tokens; None when no more than the next token
        can come anyway, or nothing is sampled."""
        if self._sampling is None:
            return None
        num_known = len(self._token_ids)
        left = min(self._sampling.max_tokens - self.num_completion, self._rules.context_tokens_max - num_known)
        most = min(most, left - 1)
        return DraftWish(self.key, self._token_ids, self._num_prompt, self._sampling, most) if most > 0 else None

    @property
    def part(self) -> tuple[int, int]:
        """[computed, known) tokens: what is left to compute before the next one is chosen."""
        return self.num_computed, len(self._token_ids)

    @property
    def reusable(self) -> tuple[HashedPrompt, int]:
        """For taking blocks again after preemption: the chain so far, and how many of its blocks may come by hash."""
        if not (self.admission.use_device and self.leaves_blocks):
            return self._hashed, 0
        return self._hashed, min(len(self._hashed.chain), (self.state.num_target - 1) // self._hashed.block_tokens)

    @property
    def next_block(self) -> BlockHash | None:
        """The full block that is computed next, or is under way; None while it only lacks what comes after those."""
        index = self.num_computed // self._hashed.block_tokens
        if self.reloading or not self.block_ids or index >= self._num_sharable:
            return None
        return self._hashed.chain[index]

    @property
    def may_take_next(self) -> bool:
        """Whether the next block may come from another run: at a block's edge, by a request that may reuse, and either
        before it has computed anything itself or where it computes for the second time. So what was not computed for
        it is always the beginning of its prompt."""
        if not self.admission.use_device or self.num_computed % self._hashed.block_tokens or self.next_block is None:
            return False
        return self.first_computed is None or self.num_computed < self._end_computed

    @property
    def num_reused_blocks(self) -> int:
        """Leading blocks of the prompt that were never computed for this run."""
        prompt = self.admission.prompt
        if self.first_computed is None:
            return min(self.num_computed // prompt.block_tokens, len(prompt.chain))
        return min(self.first_computed // prompt.block_tokens, len(prompt.chain))

    @property
    def _num_sharable(self) -> int:
        """Leading blocks that need not be computed here: of a run that samples, all but the last token's."""
        if self._sampling is None:
            return len(self._hashed.chain)
        return min(len(self._hashed.chain), (len(self._token_ids) - 1) // self._hashed.block_tokens)

    @property
    def wanted_blocks(self) -> tuple[HashedPrompt, range]:
        """The chain, and which of its blocks are taken from the pool as soon as they are there."""
        index = self.num_computed // self._hashed.block_tokens
        return self._hashed, range(index, self._num_sharable if self.may_take_next else index)

    def take(self, block_ids: Sequence[int]) -> list[int]:
        """The next blocks are there, in these; returns those that were meant for them, for the caller to give back."""
        first = self.num_computed // self._hashed.block_tokens - self.admission.first_block
        own = self.block_ids[first : first + len(block_ids)]
        self.block_ids[first : first + len(block_ids)] = block_ids
        self.num_computed += len(block_ids) * self._hashed.block_tokens
        self.admission.end_near = max(self.admission.end_near, first + len(block_ids))  # it is all there
        return own

    @property
    def num_stored(self) -> int:
        """Leading blocks that can be read back from elsewhere instead of being computed."""
        return 0 if self.backup is None else min(self.backup.num_stored(), self._num_sharable)

    @property
    def num_kept(self) -> int:
        """Leading blocks of which a copy is stored, or on its way, of those that are computed."""
        if self.backup is None:
            return 0
        return min(self.backup.num_kept(), self.num_computed // self._hashed.block_tokens)

    def unkept_blocks(self) -> list[FilledBlock]:
        """Blocks of which no copy is stored or on its way, where one may be."""
        if self.backup is None:
            return []
        first = self.backup.num_kept()
        if first < max(self.admission.first_block, self.admission.first_near):
            return []  # that one is not whole any more, and what stands on it needs it
        return [self._filled(position) for position in range(first, self.num_computed // self._hashed.block_tokens)]

    def give_up_blocks(self) -> list[int]:
        """The run holds no blocks and has computed nothing from here on; the caller gives back what is returned."""
        self.num_computed, self.in_batch, self.reloading, self.draft = 0, False, False, Draft()
        self.is_forgotten = False  # what is computed anew is shared
        return self.admission.clear()

    def resume(self, taken: Taken) -> None:
        """Blocks were taken again.

        What a window had passed is computed again, too, where it is not found: the keys and values of the last tokens
        come of those before them, layer by layer.
        """
        assert not self.block_ids
        self.block_ids.extend(taken.block_ids)
        self.admission.first_block = taken.first_block
        self.admission.first_near, self.admission.end_near = taken.first_near, taken.end_near
        self.num_computed = taken.num_shared * self._hashed.block_tokens

    def begin_reload(self, blocks: range, windows: TableWindows) -> ReloadTable:
        """These blocks, which follow those that are there, are about to be read back: nobody computes meanwhile.

        Of a model whose layers all have a window only the last window of them is, into blocks that nothing is in yet:
        what is there stays in the table, since half a window would be of no use. Where blocks have two parts, near ones
        are put where they are read afterwards.
        """
        self.reloading = True
        window, near_window, parts = windows.window, windows.near_window, windows.parts
        saved_from, table, passed = blocks.start, self.block_ids, list[int]()
        if window.bounded:
            blocks = range(max(blocks.start, window.first_of_prefix(blocks.stop)), blocks.stop)
            spare = self.block_ids[self._num_there :][: len(blocks)]
            assert len(spare) == len(blocks) > 0, "a table has room for two windows"
            table = spare[:1] * blocks.start + spare
        elif near_window.bounded:
            first = max(blocks.start, near_window.first_of_prefix(blocks.stop))
            own, near = self._near_parts(blocks.start, parts)
            near, left_over = near[: len(self.block_ids) - first], near[len(self.block_ids) - first :]
            self.block_ids[:] = parts.place(self.block_ids, near, first=first)
            for index, part in own.items():
                self.block_ids[index] = parts.join(parts.wide_of(self.block_ids[index]), part)
            self._near_read_back = range(first, first + len(near))
            passed = [parts.near_alone(part) for part in left_over]
        return ReloadTable(tuple(table), blocks, saved_from, tuple(self.block_ids), tuple(passed))

    def end_reload(self, reloaded: range, windows: TableWindows) -> tuple[int, list[int]]:
        """`reloaded` is what of the range that was to be read back is there. Returns how many blocks more than before
        that makes, since without all of the window before it no block is of use, and what its windows have passed, for
        the caller to give back."""
        self.reloading = False
        before = self.num_computed // self._hashed.block_tokens
        end = max(before, reloaded.stop)
        passed: list[int] = []
        if windows.window.bounded:
            if max(before, windows.window.first_of_prefix(end)) < reloaded.start:
                end = before
            elif reloaded.start > before:  # what was there is not read any more
                passed = self.block_ids[: self._num_there]
                del self.block_ids[: self._num_there]
                self.admission.first_block = reloaded.start
        elif windows.near_window.bounded:
            end, passed = self._end_near_reload(before, end, windows)
        self.num_computed = end * self._hashed.block_tokens
        return end - before, passed

    @property
    def _num_there(self) -> int:
        """Blocks of the table that hold KV."""
        return self.num_computed // self._hashed.block_tokens - self.admission.first_block

    def _end_near_reload(self, before: int, end: int, windows: TableWindows) -> tuple[int, list[int]]:
        """Wide parts are there up to block `end`: where the prefix ends of which all is there, and near parts that have
        no place any more."""
        window, parts = windows.near_window, windows.parts
        own, spare = self._near_parts(before, parts)
        if max(before, window.first_of_prefix(end)) < self._near_read_back.start:
            end = before
        first = window.first_of_prefix(end)
        read_back = dict(zip(self._near_read_back, spare, strict=True))
        kept = [(own | read_back)[index] for index in range(first, end)]
        free = [near for near in spare if near not in kept]
        table = (kept + free)[: len(self.block_ids) - first]
        self.block_ids[:] = parts.place(self.block_ids, table, first=first)
        self.admission.first_near, self.admission.end_near = first, first + len(table)
        return end, [parts.near_alone(near) for near in (*own.values(), *spare) if near not in table]

    def _near_parts(self, first_spare: int, parts: PartIds) -> tuple[dict[int, int], list[int]]:
        """Near parts by block, of blocks that are there, and those behind, which nothing is in yet, in order."""
        having = {i: near for i, block_id in enumerate(self.block_ids) if (near := parts.near_of(block_id)) is not None}
        return {i: n for i, n in having.items() if i < first_spare}, [n for i, n in having.items() if i >= first_spare]

    @property
    def shared_chain(self) -> HashedPrompt | None:
        """The chain, if its blocks are to be shared."""
        return self._hashed if self.leaves_blocks else None

    def step_of(self, rows: PlannedRows) -> SequenceStep:
        """What the model runner is asked to compute for these rows."""
        assert rows.start == self.num_computed
        known = rows.stop - rows.num_drafts
        return SequenceStep(
            token_ids=(*self._token_ids[rows.start : known], *self.draft.token_ids[: rows.num_drafts]),
            start=rows.start,
            block_ids=tuple(self.block_ids),
            first_block=self.admission.first_block,
            num_logits=rows.num_logits,
        )

    def computed(self, stop: int) -> HashedPrompt | None:
        """KV of positions [0, stop) is valid now. Returns the sequence with its chain as far as it is full, if that
        grew and is to be shared."""
        full_before = self.num_computed // self._hashed.block_tokens
        self.first_computed = min(self.num_computed, stop if self.first_computed is None else self.first_computed)
        self._end_computed = max(self._end_computed, stop)
        self.num_computed = stop
        num_full = stop // self._hashed.block_tokens
        if not self.leaves_blocks or num_full == full_before:
            return None
        self._extend_chain(num_full)
        return self._hashed

    def unreported_blocks(self) -> Iterator[FilledBlock]:
        """Blocks that became full since the last call, each once in a run's life, also when it was preempted since."""
        first = max(self._num_reported, self.admission.first_block, self.admission.first_near)
        for position in range(first, self.num_computed // self._hashed.block_tokens):
            yield self._filled(position)
            self._num_reported = position + 1

    def hashed_blocks(self, since: int = 0) -> Iterator[FilledBlock]:
        """Full blocks of the table that have a hash, but for those that were full when [0, since) was computed."""
        block_tokens = self._hashed.block_tokens
        end = min(self.num_computed // block_tokens, len(self._hashed.chain))
        return map(self._filled, range(max(since // block_tokens, self.admission.first_block), end))

    def _filled(self, position: int) -> FilledBlock:
        return FilledBlock(
            position=position,
            block_id=self.block_ids[position - self.admission.first_block],
            block_hash=self._hashed.chain[position],
            parent_hash=self._hashed.parent_of(position),
            token_ids=self._hashed.block_token_ids(position),
            namespace=self._hashed.namespace,
            narrowed_from=self._hashed.narrowed_from,
        )

    def check_draft(self, num_drafts: int) -> DraftCheck:
        """So many tokens of the draft were computed: compare them with what `add_token` chooses from here on."""
        self._check = DraftCheck(self.draft.token_ids[:num_drafts], self.draft.kind)
        self._num_drafted += num_drafts
        return self._check

    def add_token(self, logits: Logits) -> tuple[TokenDelta, RunFinished | None]:
        """Choose the next token from [vocab] logits of the last one; says whether it was the run's last.

        The end-of-sequence token is an output token without text. Raises LogitsInvalid.
        """
        params = self._sampling
        assert params is not None
        sampled = sample_token(logits, params, index=self.num_completion)
        self._token_ids.append(sampled.token_id)
        self._num_accepted += self._check.compare(sampled.token_id)
        at_eos = sampled.token_id in self._rules.eos_token_ids and not params.ignore_eos
        text = self._text.finish() if at_eos else detokenize(self._text, sampled.token_id)
        delta = TokenDelta(
            token_id=sampled.token_id,
            text=text.text,
            logprob=sampled.logprob,
            top_logprobs=tuple(TokenLogprob(i, self._text.token_text(i), logprob) for i, logprob in sampled.top),
        )
        if at_eos or text.stopped:
            return delta, self.finished(FinishReason.STOP)
        context_is_full = len(self._token_ids) >= self._rules.context_tokens_max
        if self.num_completion >= params.max_tokens or context_is_full:
            rest = self._text.finish()
            reason = FinishReason.STOP if rest.stopped else FinishReason.LENGTH
            return delta, self.finished(reason, rest.text)
        return delta, None

    def finished(self, reason: FinishReason | None = None, text: str = "") -> RunFinished:
        """The run's last event, as things are now."""
        return RunFinished(
            reason,
            text,
            self.num_completion,
            num_reused_blocks=self.num_reused_blocks,
            drafted_tokens=self._num_drafted,
            accepted_draft_tokens=self._num_accepted,
        )

    @property
    def num_completion(self) -> int:
        """Output tokens so far."""
        return len(self._token_ids) - self._num_prompt

    @property
    def prompt_is_computed(self) -> bool:
        """Whether a run without sampling is done."""
        return self._sampling is None and self.num_computed == len(self._hashed.chain) * self._hashed.block_tokens

    def _extend_chain(self, num_full: int) -> None:
        """Hash blocks that generated tokens filled, so that the next turn of a conversation finds them."""
        hashed, block_tokens = self._hashed, self._hashed.block_tokens
        if num_full <= len(hashed.chain):
            return
        chain = list(hashed.chain)
        while len(chain) < num_full:
            parent_hash = chain[-1] if chain else root_hash(hashed.namespace)
            token_ids = self._token_ids[len(chain) * block_tokens : (len(chain) + 1) * block_tokens]
            chain.append(hash_block(hashed.namespace, parent_hash, token_ids, self._rules.hash_algorithm))
        self._hashed = replace(hashed, token_ids=tuple(self._token_ids), chain=tuple(chain))
