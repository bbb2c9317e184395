"""What became of drafts, in numbers."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(slots=True)
class DraftCounts:
    """Drafts that were verified; vLLM's terms."""

    drafts: int = 0
    draft_tokens: int = 0
    accepted_tokens: int = 0
    accepted_at: list[int] = field(default_factory=list)  # by place in the draft

    def count(self, drafted: int, accepted: int, depth: int) -> None:
        """A draft of so many tokens, `depth` one after another, of which so many were right."""
        self.drafts += 1
        self.draft_tokens += drafted
        self.accepted_tokens += accepted
        self.accepted_at += [0] * (depth - len(self.accepted_at))
        for place in range(accepted):
            self.accepted_at[place] += 1

    def per_position(self, most: int) -> list[int]:
        """Guesses that came true at each place of drafts up to so long."""
        return self.accepted_at + [0] * (most - len(self.accepted_at))

    @property
    def acceptance_rate(self) -> float | None:
        """Of drafts' tokens, the share that was right; None before there was one."""
        return self.accepted_tokens / self.draft_tokens if self.draft_tokens else None

    @property
    def mean_acceptance_length(self) -> float | None:
        """Tokens that a verified draft came to, the one after it included."""
        return 1 + self.accepted_tokens / self.drafts if self.drafts else None

    def copy(self) -> DraftCounts:
        """As they are now."""
        return DraftCounts(
            self.drafts, self.draft_tokens, self.accepted_tokens, list(self.accepted_at)
        )

    def since(self, before: DraftCounts) -> DraftCounts:
        """What was added after `before` was copied."""
        earlier = before.accepted_at + [0] * (len(self.accepted_at) - len(before.accepted_at))
        return DraftCounts(
            self.drafts - before.drafts,
            self.draft_tokens - before.draft_tokens,
            self.accepted_tokens - before.accepted_tokens,
            [now - then for now, then in zip(self.accepted_at, earlier, strict=True)],
        )
