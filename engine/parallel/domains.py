"""Whose tokens a step has, where ranks attend to requests of their own and compute feed-forward layers together.

A KV domain is a rank with its own rows and KV cache. The core plans a step for every domain at once, and each rank runs
every step, also one in which its own domain has no tokens: it then computes its part for the others. No torch."""

from ...ipc.messages import StepPlan


class Domain:
    """This rank's domain, and its place in the step that runs."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.first = 0  # where this domain's tokens stand among those of all domains
        self.num_own = 0
        self.num_all = 0
        self.num_most = 0  # tokens of the domain that has most
        self.longest = 0  # the most tokens of a row, in any domain

    def begin(self, plan: StepPlan) -> None:
        """The next step is that of a plan."""
        nums = plan.domain_tokens
        assert self.number < len(nums), f"a plan for {len(nums)} domains, sent to domain {self.number}"
        self.first, self.num_own, self.num_all = sum(nums[: self.number]), nums[self.number], sum(nums)
        self.num_most, self.longest = max(nums), plan.domain_longest
