"""Every router that can be compared, by name: Headrace's own first, what people run today, and variants for studies."""

from headrace.simulate.baseline_policies import BASELINES
from headrace.simulate.headrace_policy import HeadracePolicy
from headrace.simulate.replay_routing import PolicyClass
from headrace.simulate.without_ingredient import VARIANTS

ROUTING_POLICIES: dict[str, PolicyClass] = {HeadracePolicy.name: HeadracePolicy, **BASELINES}

# Those too that `all` does not mean.
NAMED_POLICIES: dict[str, PolicyClass] = {**ROUTING_POLICIES, **VARIANTS}
