"""Each alert on made-up histories, by Prometheus' own `promtool`: it fires where its page says so, and is quiet on a
system that is well, that idles, or that has been ill for less than its patience.

Runs where `promtool` is (Debian's package prometheus has it). That the metrics and labels of the rules are real is for
`test_metrics_named.py` to say.
"""

import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml
from rendered_chart import EVERYTHING, one, render

GATEWAY = {
    "service": "demo-headrace-gateway",
    "namespace": "inference",
    "pod": "gateway-1",
    "instance": "10.0.0.1:8000",
}
RELEASE = {"namespace": "inference", "app_kubernetes_io_instance": "demo"}
DECODE = RELEASE | {"pod": "decode-1", "instance": "10.0.0.2:9401"}
STORE = RELEASE | {"pod": "decode-1", "instance": "10.0.0.2:9400"}
POD = {"pod": "decode-1"}
HOUR, DAY = 60, 24 * 60  # in minutes, the interval of all histories

Series = dict[str, str]


def of(target: dict[str, str], metric: str, values: str, **labels: str) -> Series:
    """A series in promtool's words: `0+30x90` grows by 30 each minute, for 90 minutes."""
    text = ", ".join(f'{key}="{value}"' for key, value in {**target, **labels}.items())
    return {"series": f"{metric}{{{text}}}", "values": values}


def requests(**per_minute: int) -> list[Series]:
    ended = ((outcome, f"0+{number}x{90}") for outcome, number in per_minute.items())
    return [of(GATEWAY, "headrace_client_requests_total", values, outcome=outcome) for outcome, values in ended]


def first_tokens(*, within_10_s: int, within_30_s: int) -> list[Series]:
    counts = {"5.0": within_10_s // 2, "10.0": within_10_s, "30.0": within_30_s, "+Inf": within_30_s}
    name = "headrace_time_to_first_token_seconds_bucket"
    return [of(GATEWAY, name, f"0+{count}x90", le=le) for le, count in counts.items()]


def faults(kind: str, values: str) -> Series:
    return of(DECODE, "headrace_cache_faults_total", values, kind=kind)


def evictions(tier: str, values: str) -> Series:
    return of(STORE, "headrace_evicted_blocks_total", values, reason="capacity", tier=tier)


def sequences(*, waiting: int, running: int) -> list[Series]:
    states = {"waiting": waiting, "running": running}
    return [
        of(DECODE, "headrace_engine_sequences", f"{n}x90", role="decode", state=state) for state, n in states.items()
    ]


def tokens(hits: str, *, minutes: int) -> list[Series]:
    return [
        of(GATEWAY, "headrace_prefix_cache_queries_total", f"0+1000x{minutes}"),
        of(GATEWAY, "headrace_prefix_cache_hits_total", hits),
    ]


@dataclass(frozen=True, slots=True)
class Illness:
    """What makes an alert fire: series, after how many minutes it does, and what it then says of where."""

    series: list[Series]
    fires_at: int
    labels: dict[str, str]


ILL: dict[str, Illness] = {
    "HeadraceNoMetrics": Illness(
        # Another release's gateways are not ours.
        [
            of(
                GATEWAY | {"service": "other-headrace-gateway"},
                "headrace_client_requests_total",
                "0+9x90",
                outcome="finished",
            )
        ],
        6,
        {"service": GATEWAY["service"], "namespace": "inference"},
    ),
    "HeadraceRequestsFail": Illness(requests(finished=98, failed=2), 12, {}),
    "HeadraceRequestsRefused": Illness(requests(finished=93, refused=7), 22, {}),
    "HeadraceFirstTokenSlow": Illness(first_tokens(within_10_s=93, within_30_s=100), 22, {}),
    "HeadraceFewGoodRequests": Illness(
        [*requests(finished=100), of(GATEWAY, "headrace_good_requests_total", "0+85x90")], 32, {}
    ),
    "HeadraceHitRateFell": Illness(tokens(f"0+600x{DAY} {600 * DAY + 200}+200x120", minutes=DAY + 120), DAY + 90, {}),
    "HeadraceIndexDoesNotAnswer": Illness(
        [of(GATEWAY, "headrace_index_failures_total", "0+12x90", call="longest_prefix")], 12, {}
    ),
    "HeadraceIndexBehind": Illness([of(GATEWAY, "headrace_index_mirror_lag_seconds", "75x90")], 6, {}),
    "HeadraceManyCallsWithoutKey": Illness(
        [of(GATEWAY, "headrace_refused_calls_total", "0+120x90", reason="unauthenticated")], 22, {}
    ),
    "HeadraceCertificateEnds": Illness(
        # Prometheus' clock stands at 0 here: of 30 days there are 12 left.
        [of(GATEWAY, "headrace_tls_certificate_expiry_timestamp_seconds", f"{12 * 86_400}x90")],
        61,
        {"pod": "gateway-1"},
    ),
    "HeadraceCallersCertificateEnds": Illness(
        [of(GATEWAY, "ray_headrace_tls_certificate_expiry_timestamp_seconds", f"{6 * 86_400}x90")],
        61,
        {"pod": "gateway-1"},
    ),
    "HeadraceBlocksRefusedOnUse": Illness(
        [of(DECODE, "headrace_verify_failures_total", "0x10 1x80", kind="checksum")], 13, POD
    ),
    "HeadraceStoreNodeFails": Illness([faults("store_unavailable", "0+45x90")], 22, POD),
    "HeadraceStoreTurnsOver": Illness(
        [evictions("host", "0+50x150"), of(STORE, "headrace_store_blocks", "2048x150", tier="host")], 120, POD
    ),
    "HeadraceNothingStored": Illness([faults("store_full", "0+12x90")], 32, POD),
    "HeadraceDiskTurnsOver": Illness(
        [
            evictions("disk", f"0+10x{2 * DAY}"),
            of(STORE, "headrace_store_blocks", f"10000x{2 * DAY}", tier="disk"),
        ],
        DAY + 2 * HOUR,
        POD,
    ),
    "HeadracePinsNearTheirShare": Illness(
        [
            of(STORE, "headrace_store_pinned_bytes", "450x90"),
            of(STORE, "headrace_store_bytes", "1000x90", tier="host"),
        ],
        16,
        POD,
    ),
    "HeadraceQueuesGrow": Illness(sequences(waiting=9, running=4), 12, {"role": "decode"}),
    "HeadraceSequencesGiveWay": Illness(
        [of(DECODE, "headrace_engine_preemptions_total", "0+15x90", role="decode")], 32, POD
    ),
    "HeadraceDrafterFailed": Illness([of(DECODE, "headrace_engine_drafter_failed", "1x90", role="decode")], 6, POD),
    "HeadracePartRestarts": Illness(
        [
            of(STORE, "process_start_time_seconds", "100x5 700x5 1300x5 1900x70"),
            of(STORE, "headrace_store_bytes", "1000x90", tier="host"),
        ],
        19,
        STORE,
    ),
}

# A system that is well and at work: something of everything that is watched, as it is on a usual day.
WELL = [
    *requests(finished=995, failed=5, refused=20, cancelled=40, invalid=10),
    of(GATEWAY, "headrace_good_requests_total", "0+960x90"),
    *first_tokens(within_10_s=99, within_30_s=100),
    of(GATEWAY, "headrace_index_failures_total", "0x30 2x60", call="longest_prefix"),
    of(GATEWAY, "headrace_index_mirror_lag_seconds", "0.2x30 20x2 0.2x58"),
    of(GATEWAY, "headrace_refused_calls_total", "0+6x90", reason="unauthenticated"),
    of(GATEWAY, "headrace_tls_certificate_expiry_timestamp_seconds", f"{21 * 86_400}x90"),
    of(DECODE, "headrace_tls_certificate_expiry_timestamp_seconds", f"{19 * 86_400}x90"),
    of(GATEWAY, "ray_headrace_tls_certificate_expiry_timestamp_seconds", f"{8 * 86_400}x90"),
    of(
        DECODE | {"pod": "other-1"} | {"app_kubernetes_io_instance": "other"},
        "headrace_tls_certificate_expiry_timestamp_seconds",
        "60x90",
    ),
    of(DECODE, "headrace_verify_failures_total", "0x90", kind="checksum"),
    faults("store_unavailable", "0x20 5x70"),
    faults("store_full", "0+1x90"),
    faults("block_missing", "0+600x90"),  # no fault of a store node: it evicted what the index still named
    evictions("host", "0+20x90"),
    evictions("disk", "0+5x90"),
    of(STORE, "headrace_store_blocks", "2048x90", tier="host"),
    of(STORE, "headrace_store_blocks", "10000x90", tier="disk"),
    of(STORE, "headrace_store_bytes", "1000x90", tier="host"),
    of(STORE, "headrace_store_pinned_bytes", "300x90"),
    *sequences(waiting=2, running=8),
    of(DECODE, "headrace_engine_preemptions_total", "0+6x90", role="decode"),
    of(DECODE, "headrace_engine_drafter_failed", "0x90", role="decode"),
    of(STORE, "process_start_time_seconds", "100x30 1900x60"),  # one upgrade
]
# Nobody asks for anything.
IDLE = [
    *requests(finished=0, failed=0, refused=0),
    of(GATEWAY, "headrace_good_requests_total", "0x90"),
    *first_tokens(within_10_s=0, within_30_s=0),
    *tokens("0x90", minutes=0),
    evictions("host", "0x90"),
    of(STORE, "headrace_store_blocks", "0x90", tier="host"),
    of(STORE, "headrace_store_bytes", "0x90", tier="host"),
    of(STORE, "headrace_store_pinned_bytes", "0x90"),
    *sequences(waiting=0, running=0),
]
# Of the two alerts that look back a day.
WELL_FOR_DAYS = [
    *tokens(f"0+600x{DAY} {600 * DAY + 400}+400x120", minutes=DAY + 120),
    evictions("disk", f"0+5x{2 * DAY}"),
    of(STORE, "headrace_store_blocks", f"10000x{2 * DAY}", tier="disk"),
]


def rules() -> dict[str, dict[str, Any]]:
    """Alert -> rule, as they are in a release."""
    groups = one(render(EVERYTHING), "PrometheusRule")["spec"]["groups"]
    return {rule["alert"]: rule for group in groups for rule in group["rules"]}


def minutes(rule: dict[str, Any]) -> int:
    return int(rule["for"][:-1]) * {"m": 1, "h": HOUR}[rule["for"][-1]]


def quiet(alerts: list[str], *moments: int) -> list[dict[str, Any]]:
    return [{"eval_time": f"{at}m", "alertname": alert, "exp_alerts": []} for alert in alerts for at in moments]


def illness_test(rule: dict[str, Any], ill: Illness) -> dict[str, Any]:
    """It is quiet for as long as it is patient, and then fires."""
    fired = {"exp_labels": ill.labels | rule["labels"], "exp_annotations": rule["annotations"]}
    asked = quiet([rule["alert"]], minutes(rule) - 1)
    asked.append({"eval_time": f"{ill.fires_at}m", "alertname": rule["alert"], "exp_alerts": [fired]})
    return {"name": rule["alert"], "interval": "1m", "input_series": ill.series, "alert_rule_test": asked}


def promtool(folder: Path, tests: list[dict[str, Any]], *, every: str) -> None:
    """Have it evaluate the rules of a release, every so often, in these histories."""
    program = shutil.which("promtool")
    if program is None:
        pytest.skip("promtool is not here (Debian's package prometheus has it)")
    (folder / "rules.yaml").write_text(yaml.safe_dump({"groups": [{"name": "all", "rules": [*rules().values()]}]}))
    asked = {"rule_files": ["rules.yaml"], "evaluation_interval": every, "tests": tests}
    (folder / "tests.yaml").write_text(yaml.safe_dump(asked))
    done = subprocess.run(
        [program, "test", "rules", "tests.yaml"], cwd=folder, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_every_alert_has_a_history_in_which_it_fires():
    assert ILL.keys() == rules().keys()


def test_each_alert_fires_when_its_patience_is_over_and_not_before(tmp_path: Path):
    short = [illness_test(rules()[alert], ill) for alert, ill in ILL.items() if ill.fires_at < DAY]
    promtool(tmp_path, short, every="1m")


def test_alerts_that_look_back_a_day_fire_then(tmp_path: Path):
    long = [illness_test(rules()[alert], ill) for alert, ill in ILL.items() if ill.fires_at >= DAY]
    assert len(long) == 2
    well = quiet([test["name"] for test in long], DAY, DAY + 90)
    long.append({"name": "well", "interval": "1m", "input_series": WELL_FOR_DAYS, "alert_rule_test": well})
    promtool(tmp_path, long, every="10m")


@pytest.mark.parametrize("history", ["well", "idle"])
def test_no_alert_fires_where_nothing_is_wrong(tmp_path: Path, history: str):
    asked = quiet([*rules()], 15, 45, 89)
    series = {"well": WELL, "idle": IDLE}[history]
    promtool(
        tmp_path, [{"name": history, "interval": "1m", "input_series": series, "alert_rule_test": asked}], every="1m"
    )
