"""A scripted attack run: what is tried on a running system is refused with the right answer and counted, and the system
serves everybody afterwards. The table of docs/security.md is what is tried here."""

import logging
from pathlib import Path

import attacks
import wire_attacks
from attacked_system import ATTACKER, OPERATOR, PROMPT, VICTIM, attacked_system

DOCS = Path(__file__).parents[2] / "docs" / "security.md"


async def test_every_attack_is_refused_and_counted_and_hurts_nobody(model_path, tmp_path, caplog):
    """Fails when an attack gets another answer than the table says, is not counted, or leaves anything behind: an error
    in the log too, since whoever can make one can make a million.

    One system for all of them, as an attacker would have it.
    """
    wrong = []
    async with attacked_system(model_path, tmp_path) as system:
        assert wire_attacks.attacks is attacks, "both files fill one table"
        for each in attacks.ATTACKS:
            before = system.counts()
            try:
                answer = await each.run(system)
            except Exception as error:  # the others are to be tried as well
                answer = repr(error)
            after = system.counts()
            if answer != each.answer:
                wrong.append(f"{each.tried}: {answer}, not {each.answer}")
            if each.counted and after.get(each.counted, 0) <= before.get(each.counted, 0):
                wrong.append(f"{each.tried}: {each.counted} did not rise")
            internal = 'headrace_refused_calls_total{reason="other"}'
            if after.get(internal, 0) > before.get(internal, 0):
                wrong.append(f"{each.tried}: an internal error")
            wrong += [f"{each.tried}: {line.getMessage()}" for line in caplog.records if line.levelno >= logging.ERROR]
            caplog.clear()
        assert not wrong, "\n".join(wrong)
        for tenant in (VICTIM, ATTACKER, OPERATOR):
            assert await attacks.cached_tokens(system, tenant, tenant + PROMPT) == 0  # served, and for the first time
        await system.at_rest()
        system.store.node.check_integrity()
        system.gateway.service.places.rates.check_integrity()


def test_the_table_of_the_documents_is_of_these_attacks():
    assert attacks.table() in DOCS.read_text(encoding="utf-8")
