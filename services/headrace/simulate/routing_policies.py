"""Every router that can be compared, by name: Headrace's own first."""

from headrace.simulate.baseline_policies import BASELINES
from headrace.simulate.headrace_policy import HeadracePolicy
from headrace.simulate.replay_routing import PolicyClass

ROUTING_POLICIES: dict[str, PolicyClass] = {HeadracePolicy.name: HeadracePolicy, **BASELINES}
